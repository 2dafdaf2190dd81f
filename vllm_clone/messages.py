"""The wire between API servers and the engine: msgspec structs, msgpack-encoded, never pickled.

A frame to the engine is one :data:`ToEngine` value, a frame from it one :data:`FromEngine` value.
"""

import enum
from typing import Any

import msgspec

from vllm_clone.errors import ErrorKind
from vllm_clone.sampling_params import SamplingParams


class FinishReason(enum.IntEnum):
    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return self.name.lower()


class EventType(enum.IntEnum):
    QUEUED = 0
    SCHEDULED = 1
    PREEMPTED = 2


class _Wire(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class EngineCoreRequest(_Wire):
    """One sequence to generate. ``request_id`` is internal and unique; params have n == 1 and are resolved."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    """Wall clock, seconds."""
    client_index: int = 0
    priority: int = 0
    """Smaller is served sooner under the priority policy."""
    cache_salt: str | None = None
    grammar_begins_after: list[int] | None = None
    """Ids that end a chain of thought: only what follows them must follow the grammar. None: all of the output."""


class AbortRequests(_Wire):
    request_ids: list[str]


class UtilityCall(_Wire):
    """Call a named engine method (``ping``, ``reset_prefix_cache`` …) from the loop thread; answered once."""

    call_id: int
    method: str
    args: list[Any] = []
    client_index: int = 0


class ShutdownRequest(_Wire):
    """Stop taking requests; abort what runs at once (timeout 0) or after ``timeout`` seconds of draining."""

    timeout: float = 0.0


ToEngine = EngineCoreRequest | AbortRequests | UtilityCall | ShutdownRequest


class LogprobRows(msgspec.Struct, array_like=True, gc=False):
    """Scores for consecutive positions: row i has the sampled (or prompt) token first, then its top N.

    ``token_ids`` and ``logprobs`` have equal row lengths; ``ranks[i]`` is the 1-based rank of the first entry.
    """

    token_ids: list[list[int]]
    logprobs: list[list[float]]
    ranks: list[int]


class EngineCoreEvent(msgspec.Struct, array_like=True, gc=False):
    type: EventType
    timestamp: float
    """Engine monotonic clock, seconds."""


class PrefillStats(msgspec.Struct, array_like=True, gc=False):
    """Sent with a request's first output: how its prompt tokens came about."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_created_cache_tokens: int = 0


class EngineCoreOutput(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What one request produced in one step."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    """Rows for prompt positions 1 … prompt_len − 1, sent once, with the first output."""
    events: list[EngineCoreEvent] = []
    prefill_stats: PrefillStats | None = None
    num_preemptions: int = 0
    error: str | None = None
    """Message for the client when finish_reason is ERROR."""
    error_kind: ErrorKind = "internal"


class KVEviction(msgspec.Struct, array_like=True, gc=False):
    """The life of one sampled KV block, in seconds."""

    lifetime: float
    """From allocation until what it caches is overwritten."""
    idle: float
    """From its last use until then."""
    reuse_gaps: list[float] = []
    """Between its uses."""


class StepCounts(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Steps since the last report, and their tokens, by how they ran."""

    replayed: int = 0
    replayed_tokens: int = 0
    direct: int = 0
    """Through Python."""
    direct_tokens: int = 0


class SchedulerStats(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """State after a step, plus counts since the last report."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_deferred: int = 0
    kv_cache_usage: float = 0.0
    """Fraction of usable blocks that are taken, 0 … 1."""
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    kv_evictions: list[KVEviction] = []
    steps: StepCounts | None = None
    """With --cudagraph-metrics."""
    flops: float = 0.0
    """Estimates for the steps since the last report, with --enable-mfu-metrics."""
    read_bytes: float = 0.0
    write_bytes: float = 0.0


class UtilityResult(msgspec.Struct, array_like=True, gc=False):
    call_id: int
    result: Any = None
    error: str | None = None


class EngineCoreOutputs(_Wire):
    """Everything one client is told after one step."""

    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    """Engine monotonic clock, seconds."""
    utility_result: UtilityResult | None = None
    engine_index: int = 0


class EngineReady(_Wire):
    """The engine has loaded its weights and its KV cache and now turns."""

    num_blocks: int
    block_size: int
    max_model_len: int
    cache_dtype: str
    kv_cache_bytes: int
    weight_bytes: int
    load_seconds: float
    pid: int


class EngineFailed(_Wire):
    """The engine cannot start or go on; ``message`` is the cause and the remedy in one line."""

    message: str


FromEngine = EngineCoreOutputs | EngineReady | EngineFailed
