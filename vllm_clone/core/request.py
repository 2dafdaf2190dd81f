"""The scheduler's view of one request."""

import enum
import time

from vllm_clone.core.kv_cache.hashing import BlockHash, Hasher
from vllm_clone.core.structured_output.grammar import RequestGrammar
from vllm_clone.messages import EngineCoreEvent, EngineCoreRequest, EventType, FinishReason, LogprobRows


class RequestStatus(enum.IntEnum):
    """Waiting states come first, finished ones last, so that "finished" is a comparison."""

    WAITING_FOR_GRAMMAR = 0
    WAITING = 1
    PREEMPTED = 2
    RUNNING = 3
    FINISHED = 4


class BlockHasher:
    """Hashes full blocks of a request's tokens as they come."""

    def __init__(self, block_size: int, hasher: Hasher, root: BlockHash) -> None:
        self.block_size = block_size
        self._hasher = hasher
        self._root = root

    def extend(self, hashes: list[BlockHash], tokens: list[int], salt: str | None) -> None:
        """Append the hashes of the blocks that ``tokens`` fill and that ``hashes`` lacks."""
        size = self.block_size
        for start in range(len(hashes) * size, len(tokens) - size + 1, size):
            parent = hashes[-1] if hashes else self._root
            hashes.append(self._hasher(parent, tokens[start : start + size], salt if start == 0 else None))


class Request:
    """Tokens, progress and limits of one request. Owned by the scheduler."""

    __slots__ = (
        "_hasher",
        "all_token_ids",
        "arrival_time",
        "block_hashes",
        "cache_salt",
        "client_index",
        "eos_token_id",
        "events",
        "finish_reason",
        "grammar",
        "max_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "prompt_logprobs",
        "request_id",
        "sampling_params",
        "skip_prefix_cache",
        "status",
        "stop_reason",
        "stop_token_ids",
    )

    def __init__(self, core: EngineCoreRequest, hasher: BlockHasher | None = None) -> None:
        params = core.sampling_params
        self.request_id = core.request_id
        self.client_index = core.client_index
        self.arrival_time = core.arrival_time
        self.priority = core.priority
        self.cache_salt = core.cache_salt
        self.sampling_params = params
        self.num_prompt_tokens = len(core.prompt_token_ids)
        self.all_token_ids = list(core.prompt_token_ids)
        """Prompt, then sampled outputs."""
        self.max_tokens = params.max_tokens or 1
        self.eos_token_id = None if params.ignore_eos else params.eos_token_id
        self.stop_token_ids = frozenset(params.stop_token_ids)
        skip = params.skip_reading_prefix_cache
        self.skip_prefix_cache = params.prompt_logprobs is not None if skip is None else skip

        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        """Positions whose keys and values are, or are being, written."""
        self.num_cached_tokens = -1
        """Prefix cache hit at first admission; −1 before."""
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.events: list[EngineCoreEvent] = []
        self.prompt_logprobs: LogprobRows | None = None
        """Rows of the prompt chunks computed so far, until the first output carries them away."""
        self.grammar: RequestGrammar | None = None
        """What the output must follow; survives a preemption, as the outputs do."""
        self._hasher = hasher
        self.block_hashes: list[BlockHash] = []
        self._extend_hashes()

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status >= RequestStatus.FINISHED

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    def append_token(self, token_id: int) -> None:
        self.all_token_ids.append(token_id)
        if self._hasher is not None and not len(self.all_token_ids) % self._hasher.block_size:
            self._extend_hashes()

    def record(self, event: EventType, timestamp: float | None = None) -> None:
        self.events.append(EngineCoreEvent(event, time.monotonic() if timestamp is None else timestamp))

    def take_events(self) -> list[EngineCoreEvent]:
        events, self.events = self.events, []
        return events

    def add_prompt_logprobs(self, rows: LogprobRows) -> None:
        have = self.prompt_logprobs
        if have is None:
            self.prompt_logprobs = rows
        else:
            have.token_ids += rows.token_ids
            have.logprobs += rows.logprobs
            have.ranks += rows.ranks

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        self.status = RequestStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def _extend_hashes(self) -> None:
        if self._hasher is not None:
            self._hasher.extend(self.block_hashes, self.all_token_ids, self.cache_salt)
