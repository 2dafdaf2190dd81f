"""The scheduler: one rule, one token budget, no phases.

Each request has ``num_computed_tokens`` chasing ``num_tokens``. A step hands every request some of the tokens
it still lacks, running requests first (in order of admission), then waiting ones. Chunked prefill, prefix
caching and resumption after preemption are all this one move.
"""

import random
import time
from collections.abc import Callable, Iterable

from vllm_clone.config import VllmConfig
from vllm_clone.config.kv_cache import KVCacheConfig
from vllm_clone.config.kv_events import kv_events_options
from vllm_clone.core.kv_cache.events import KVEventLog
from vllm_clone.core.kv_cache.hashing import make_hasher
from vllm_clone.core.kv_cache.manager import KVCacheManager, PrefixHit
from vllm_clone.core.kv_cache.residency import Residency
from vllm_clone.core.request import BlockHasher, Request, RequestStatus
from vllm_clone.core.sched.queue import make_queue
from vllm_clone.core.sched.stop import check_stop
from vllm_clone.core.structured_output.grammar import GrammarSource
from vllm_clone.errors import ErrorKind, RequestError
from vllm_clone.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EventType,
    FinishReason,
    LogprobRows,
    PrefillStats,
    SchedulerStats,
)
from vllm_clone.step import BlockIds, ModelRunnerOutput, NewRequest, RunningRequests, SchedulerOutput

_NOTHING_ALLOWED = (
    "The grammar allows no token here that allowed_token_ids, bad_words, logit_bias or min_tokens leave, or it is too "
    "complex to follow any further."
)
FULL_SPEED_TOKENS = {"cpu": 512}
"""Device → prompt tokens with which a step runs at full speed: more prompts in it would only wait for each other."""


class Scheduler:
    """Decides each step's work and takes in its results. Owns every request between arrival and finish."""

    def __init__(
        self, config: VllmConfig, kv_cache_config: KVCacheConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        sched, cache = config.scheduler_config, config.cache_config
        assert sched.max_num_batched_tokens is not None
        assert sched.max_num_seqs is not None
        assert config.model_config.max_model_len is not None
        self._clock = clock
        self.max_model_len = config.model_config.max_model_len
        self.max_tokens_per_step = sched.max_num_scheduled_tokens or sched.max_num_batched_tokens
        self.full_speed_tokens = FULL_SPEED_TOKENS.get(config.device_config.device, self.max_tokens_per_step)
        self.max_num_seqs = sched.max_num_active_seqs or sched.max_num_seqs
        self.chunked_prefill = sched.enable_chunked_prefill is not False
        self.long_prefill = sched.long_prefill_token_threshold if self.chunked_prefill else 0
        self.adaptive_prefill = sched.long_prefill_token_threshold_adaptive
        self.reserve_full = sched.scheduler_reserve_full_isl
        self.by_priority = sched.scheduling_policy == "priority"
        caching = cache.enable_prefix_caching is not False
        seen = config.observability_config
        self._residency = (
            Residency(seen.kv_cache_metrics_sample, clock, random.random) if seen.kv_cache_metrics else None
        )
        self.kv_events: KVEventLog | None = None
        """What the KV cache has to tell routers."""
        if kv_events_options(config.kv_events_config) is not None:
            self.kv_events = KVEventLog([group.spec for group in kv_cache_config.groups])
        self.kv = KVCacheManager(
            kv_cache_config, self.max_model_len, caching, self.max_tokens_per_step, sched.watermark, self._residency,
            self.kv_events,
        )  # fmt: skip
        self._hasher = (
            BlockHasher(self.kv.block_size, *make_hasher(cache.prefix_caching_hash_algo)) if caching else None
        )
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = make_queue(sched.scheduling_policy)
        self.grammars: GrammarSource | None = None
        """Where requests with structured outputs get their grammars from; set by the engine."""
        self.constrained: dict[str, Request] = {}
        """Requests whose output must follow a grammar, once it is compiled."""
        self._compiling: dict[str, Request] = {}
        """Requests that wait for their grammar, by order of arrival."""
        self._finished_ids: set[str] = set()
        self._preempted_ids: set[str] = set()
        self._immediate: list[tuple[int, EngineCoreOutput]] = []
        self._stats = SchedulerStats()

    # ---- requests in and out ----

    def add_request(self, core: EngineCoreRequest) -> None:
        """Queue a request. One that could never fit the KV cache is finished with an error instead."""
        if core.request_id in self.requests:
            raise ValueError(f"request id {core.request_id!r} is in use")
        request = Request(core, self._hasher)
        if (reason := self._unservable(request)) is not None:
            self._reject(request, reason)
            return
        if core.sampling_params.structured_outputs is not None and not self._begin_grammar(request, core):
            return
        request.record(EventType.QUEUED, self._clock())
        self.requests[request.request_id] = request
        if request.grammar is None:
            self.waiting.add(request)
        else:
            request.status = RequestStatus.WAITING_FOR_GRAMMAR
            self._compiling[request.request_id] = request

    def finish_requests(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[Request]:
        """End requests from outside, in any state; unknown and finished ids are ignored. The ended ones."""
        ended = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.status is RequestStatus.RUNNING:
                self.running.remove(request)
            elif request.status is RequestStatus.WAITING_FOR_GRAMMAR:
                del self._compiling[request_id]
            else:
                self.waiting.remove(request)
            request.finish(reason)
            self._forget(request)
            ended.append(request)
        return ended

    def fail_request(self, request: Request, message: str, kind: ErrorKind = "internal") -> None:
        """End one request with an error that its client gets to see."""
        self.finish_requests([request.request_id], FinishReason.ERROR)
        self._reject(request, message, kind)

    def abort_all(self) -> None:
        """End every request; each client gets a last output with finish reason abort."""
        for request in self.finish_requests(list(self.requests)):
            output = EngineCoreOutput(request.request_id, [], FinishReason.ABORT, events=request.take_events())
            self._immediate.append((request.client_index, output))

    @property
    def num_unfinished(self) -> int:
        return len(self.requests)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything: requests that can go on, or news for workers or clients."""
        if self._finished_ids or self._immediate or len(self.requests) > len(self._compiling):
            return True
        return any(request.grammar is not None and request.grammar.is_compiled for request in self._compiling.values())

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while a request holds blocks."""
        return self.kv.reset_prefix_cache()

    # ---- one step ----

    def schedule(self) -> SchedulerOutput:
        """Choose this step's tokens and advance ``num_computed_tokens`` past them."""
        scheduled: dict[str, int] = {}
        new: list[NewRequest] = []
        columns = RunningRequests()
        if self._compiling:
            self._take_compiled()
        budget = self._schedule_running(scheduled, columns)
        if not self._preempted_ids:
            self._schedule_waiting(budget, scheduled, new)
        for request_id, count in scheduled.items():
            self.requests[request_id].num_computed_tokens += count
        output = SchedulerOutput(
            new, columns, scheduled, sum(scheduled.values()), self._finished_ids, self._preempted_ids
        )
        self._finished_ids, self._preempted_ids = set(), set()
        return output

    def _schedule_running(self, scheduled: dict[str, int], columns: RunningRequests) -> int:
        budget = self.max_tokens_per_step
        rows: dict[str, BlockIds] = {}
        grow, running = self.kv.grow, self.running
        index = 0
        while index < len(running) and budget > 0:
            request = running[index]
            count = len(request.all_token_ids) - request.num_computed_tokens
            if count > 1:
                count = self._cap(count, budget)
            blocks = grow(request, count)
            while blocks is None:
                victim = self._victim()
                budget += scheduled.pop(victim.request_id, 0)
                rows.pop(victim.request_id, None)
                index -= running.index(victim) < index
                self._preempt(victim)
                if victim is request:
                    break
                blocks = grow(request, count)
            if blocks is None:  # it was the victim itself; the next one has moved to its place
                continue
            scheduled[request.request_id] = count
            rows[request.request_id] = blocks
            budget -= count
            index += 1
        requests = self.requests
        columns.req_ids = list(rows)
        columns.new_block_ids = [blocks or None for blocks in rows.values()]
        columns.num_computed_tokens = [requests[request_id].num_computed_tokens for request_id in rows]
        return budget

    def _schedule_waiting(self, budget: int, scheduled: dict[str, int], new: list[NewRequest]) -> None:
        while budget > 0 and len(self.waiting) and len(self.running) < self.max_num_seqs:
            # Every request in the step has at least one token; the rest are prompts.
            if self.max_tokens_per_step - budget - len(scheduled) >= self.full_speed_tokens:
                break
            request = self.waiting.peek()
            hit = self.kv.find_prefix(request)
            lacking = request.num_tokens - hit.num_tokens
            count = self._cap(lacking, budget)
            if count < lacking and not self.chunked_prefill:
                break
            blocks = self.kv.admit(
                request, count, hit, reserve_full=self.reserve_full, keep_watermark=bool(self.running)
            )
            if blocks is None:
                break
            self.waiting.pop()
            self._admit(request, hit)
            scheduled[request.request_id] = count
            budget -= count
            new.append(
                NewRequest(
                    request.request_id,
                    request.all_token_ids.copy(),
                    request.num_prompt_tokens,
                    request.sampling_params,
                    blocks,
                    request.num_computed_tokens,
                )
            )

    def _begin_grammar(self, request: Request, core: EngineCoreRequest) -> bool:
        """Have a request's grammar compiled; False when it is refused at once."""
        try:
            if self.grammars is None:
                raise RequestError("This engine has no structured outputs.", kind="not_implemented")
            request.grammar = self.grammars.begin(core)
        except RequestError as error:
            self._reject(request, error.message, error.kind)
            return False
        return True

    def _take_compiled(self) -> None:
        """Queue the requests whose grammar is there, end those that will never have one."""
        assert self.grammars is not None
        self.grammars.expire()
        for request in [r for r in self._compiling.values() if r.grammar is not None and r.grammar.is_compiled]:
            assert request.grammar is not None
            if (failure := request.grammar.failure) is not None:
                self.fail_request(request, failure.message, failure.kind)
                continue
            request.grammar.start()
            del self._compiling[request.request_id]
            request.status = RequestStatus.WAITING
            self.constrained[request.request_id] = request
            self.waiting.add(request)

    def _cap(self, lacking: int, budget: int) -> int:
        """How many of a request's ``lacking`` tokens this step computes."""
        if self.long_prefill and len(self.requests) > 1:
            fair = self.max_tokens_per_step // len(self.requests) if self.adaptive_prefill else 0
            return min(lacking, budget, max(self.long_prefill, fair))
        return min(lacking, budget)

    def _admit(self, request: Request, hit: PrefixHit) -> None:
        if self.kv.enable_caching and not request.skip_prefix_cache and not request.num_preemptions:
            self._stats.prefix_cache_queries += request.num_tokens
            self._stats.prefix_cache_hits += hit.num_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = hit.num_tokens
        request.num_computed_tokens = hit.num_tokens
        request.status = RequestStatus.RUNNING
        request.record(EventType.SCHEDULED, self._clock())
        self.running.append(request)

    def _victim(self) -> Request:
        if self.by_priority:
            return max(self.running, key=lambda r: (r.priority, r.arrival_time))
        return self.running[-1]

    def _preempt(self, request: Request) -> None:
        """Give up a running request's blocks; its outputs stay and are computed again later."""
        self.running.remove(request)
        self.kv.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.prompt_logprobs = None  # an unfinished prompt starts over
        request.num_preemptions += 1
        request.record(EventType.PREEMPTED, self._clock())
        self._stats.num_preemptions += 1
        self._preempted_ids.add(request.request_id)
        self.waiting.put_back(request)

    # ---- results ----

    def update_from_output(self, step: SchedulerOutput, result: ModelRunnerOutput) -> dict[int, EngineCoreOutputs]:
        """Take in a step's tokens: append, check for stops, free what ended. Outputs per client index."""
        outputs: dict[int, list[EngineCoreOutput]] = {}
        ended = False
        sampled, logprobs = result.sampled_token_ids, result.logprobs
        for request_id, rows in result.prompt_logprobs.items():
            request = self.requests.get(request_id)
            if request is not None and not request.num_output_tokens:
                request.add_prompt_logprobs(rows)
        for request_id in step.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None:
                continue  # aborted while the step ran
            new_ids = sampled.get(request_id)
            if not new_ids:
                continue
            grammar = request.grammar
            if grammar is not None and not all(map(grammar.accept, new_ids)):
                self.fail_request(request, _NOTHING_ALLOWED, "invalid")
                continue
            for n, token in enumerate(new_ids, 1):
                request.append_token(token)
                if check_stop(request, self.max_model_len):
                    ended = True
                    new_ids = new_ids[:n]
                    break
            output = EngineCoreOutput(
                request_id, new_ids, request.finish_reason, request.stop_reason, logprobs.get(request_id)
            )
            if request.num_output_tokens == len(new_ids):
                self._first_output(request, output)
            if request.events:
                output.events = request.take_events()
            if request.is_finished:
                output.num_preemptions = request.num_preemptions
                self._forget(request)
            outputs.setdefault(request.client_index, []).append(output)
        if ended:
            self.running = [r for r in self.running if not r.is_finished]
        for client, output in self._immediate:
            outputs.setdefault(client, []).append(output)
        self._immediate.clear()
        now = self._clock()
        return {client: EngineCoreOutputs(outs, timestamp=now) for client, outs in outputs.items()}

    def make_stats(self) -> SchedulerStats:
        """State now, and counts since the last call."""
        stats, self._stats = self._stats, SchedulerStats()
        stats.num_running = len(self.running)
        stats.num_waiting_deferred = len(self._compiling)
        stats.num_waiting = len(self.waiting) + stats.num_waiting_deferred
        stats.kv_cache_usage = self.kv.usage
        if self._residency is not None:
            stats.kv_evictions = self._residency.take()
        return stats

    def _first_output(self, request: Request, output: EngineCoreOutput) -> None:
        if request.sampling_params.prompt_logprobs is not None:
            output.prompt_logprobs = request.prompt_logprobs or LogprobRows([], [], [])
            request.prompt_logprobs = None
        cached = request.num_cached_tokens
        created = request.num_prompt_tokens // self.kv.block_size * self.kv.block_size - cached
        output.prefill_stats = PrefillStats(
            request.num_prompt_tokens, cached, max(created, 0) if self.kv.enable_caching else 0
        )

    def _unservable(self, request: Request) -> str | None:
        """Why a request could never run to its end, or None."""
        prompt, kv = request.num_prompt_tokens, self.kv
        if not 0 < prompt < self.max_model_len:
            return f"The prompt has {prompt} tokens; it needs at least 1 and fewer than {self.max_model_len}."
        longest = min(prompt + request.max_tokens, self.max_model_len) - 1  # the last token needs no slot
        if not self.chunked_prefill and longest > self.max_tokens_per_step:
            return (
                f"The request may grow to {longest + 1} tokens; without chunked prefill a step must take it whole, "
                f"and takes {self.max_tokens_per_step}. Lower max_tokens, shorten the prompt, or start the server "
                "with a larger --max-num-batched-tokens."
            )
        if not kv.can_ever_fit(longest):
            return (
                f"The request may grow to {longest + 1} tokens, which needs {kv.max_blocks(longest)} KV cache blocks "
                f"of {kv.block_size} tokens; there are {kv.pool.num_blocks - 1}. Lower max_tokens, shorten the "
                "prompt, or start the server with a larger --kv-cache-memory-bytes."
            )
        return None

    def _forget(self, request: Request) -> None:
        self.kv.free(request)
        del self.requests[request.request_id]
        if request.grammar is not None:
            self.constrained.pop(request.request_id, None)
        self._finished_ids.add(request.request_id)

    def _reject(self, request: Request, message: str, kind: ErrorKind = "internal") -> None:
        output = EngineCoreOutput(request.request_id, [], FinishReason.ERROR, error=message, error_kind=kind)
        self._immediate.append((request.client_index, output))
