"""A scheduler with a model that is played: tokens are a function of (request, position), and every KV slot
remembers which tokens it was written for, so that a wrong block shows at once."""

import dataclasses
import itertools
from collections import Counter

from vllm_clone.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm_clone.config.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheSpec, SlidingWindowSpec
from vllm_clone.core.request import Request, RequestStatus
from vllm_clone.core.sched.scheduler import Scheduler
from vllm_clone.messages import EngineCoreOutput, EngineCoreRequest, FinishReason, LogprobRows
from vllm_clone.sampling_params import SamplingParams
from vllm_clone.step import ModelRunnerOutput, NewRequest, SchedulerOutput

EOS = 1
VOCAB = 50


def full(block_size: int = 4) -> FullAttentionSpec:
    return FullAttentionSpec(block_size, 1, 8, "float32")


def sliding(window: int, block_size: int = 4) -> SlidingWindowSpec:
    return SlidingWindowSpec(block_size, 1, 8, "float32", window)


def kv_config(num_blocks: int, *specs: KVCacheSpec) -> KVCacheConfig:
    return KVCacheConfig(num_blocks, tuple(KVCacheGroup((f"layer{i}",), spec) for i, spec in enumerate(specs)))


def make_scheduler(
    *specs: KVCacheSpec,
    num_blocks: int = 100,
    max_model_len: int = 256,
    budget: int = 64,
    max_num_seqs: int = 16,
    caching: bool = True,
    policy: str = "fcfs",
    chunked: bool = True,
    long_prefill: int = 0,
    reserve_full: bool = True,
    watermark: float = 0.0,
    hash_algo: str = "xxhash",
    device: str = "auto",
) -> Scheduler:
    config = VllmConfig(
        model_config=ModelConfig(max_model_len=max_model_len),
        cache_config=CacheConfig(enable_prefix_caching=caching, prefix_caching_hash_algo=hash_algo),  # type: ignore[arg-type]
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=max_num_seqs,
            scheduling_policy=policy,  # type: ignore[arg-type]
            enable_chunked_prefill=chunked,
            long_prefill_token_threshold=long_prefill,
            scheduler_reserve_full_isl=reserve_full,
            watermark=watermark,
        ),
        device_config=DeviceConfig(device=device),  # type: ignore[arg-type]
    )
    ticks = itertools.count()
    return Scheduler(config, kv_config(num_blocks, *(specs or (full(),))), clock=lambda: float(next(ticks)))


_arrivals = itertools.count()


def core_request(
    request_id: str,
    prompt: list[int] | int,
    *,
    max_tokens: int = 4,
    priority: int = 0,
    arrival: float | None = None,
    salt: str | None = None,
    client: int = 0,
    **params: object,
) -> EngineCoreRequest:
    """A request; an integer prompt stands for that many tokens, equal for all requests (a shared prefix)."""
    tokens = list(range(100, 100 + prompt)) if isinstance(prompt, int) else prompt
    when = float(next(_arrivals)) if arrival is None else arrival
    sampling = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return EngineCoreRequest(request_id, tokens, sampling, when, client, priority, salt)


def next_token(request_id: str, position: int) -> int:
    """What the played model says at ``position``; about one token in 25 is the EOS id."""
    value = hash((sum(map(ord, request_id)) * 31 + len(request_id), position, 12345))
    return EOS if value % 25 == 0 else 2 + value % (VOCAB - 2)


class FakeRunner:
    """Runs steps like the workers do, from the step data alone, and checks what it is asked to read."""

    def __init__(self, specs: list[KVCacheSpec], block_size: int = 4) -> None:
        self.windows = [s.sliding_window if isinstance(s, SlidingWindowSpec) else None for s in specs]
        self.block_size = block_size
        self.requests: dict[str, NewRequest] = {}
        self.salts: dict[str, str | None] = {}
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}
        """(block, offset) → (group, fingerprint of the tokens up to and including this one)."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in step.finished_req_ids | step.preempted_req_ids:
            self.requests.pop(request_id, None)
        for new in step.new:
            assert new.req_id not in self.requests
            tables = tuple(list(table) for table in new.block_ids)
            self.requests[new.req_id] = dataclasses.replace(new, token_ids=list(new.token_ids), block_ids=tables)
        columns = step.running
        rows = zip(columns.req_ids, columns.new_block_ids, columns.num_computed_tokens, strict=True)
        for request_id, new_blocks, computed in rows:
            request = self.requests[request_id]
            assert computed == request.num_computed_tokens
            for table, ids in zip(request.block_ids, new_blocks or (), strict=bool(new_blocks)):
                table.extend(ids)
        assert {n.req_id for n in step.new}.isdisjoint(columns.req_ids)
        assert {n.req_id for n in step.new} | set(columns.req_ids) == set(step.num_scheduled_tokens)
        self._write(step)
        self._check_reads(step)
        return self._sample(step)

    def _write(self, step: SchedulerOutput) -> None:
        written: Counter[tuple[int, int]] = Counter()
        for request_id, count in step.num_scheduled_tokens.items():
            request = self.requests[request_id]
            prints = self._fingerprints(request)
            for position in range(request.num_computed_tokens, request.num_computed_tokens + count):
                for group, table in enumerate(request.block_ids):
                    block = table[position // self.block_size]
                    assert block != 0, "the null block must not be written"
                    slot = (block, position % self.block_size)
                    written[slot] += 1
                    self.slots[slot] = (group, prints[position])
        assert not written or max(written.values()) == 1, "two writers of one slot"

    def _check_reads(self, step: SchedulerOutput) -> None:
        for request_id, count in step.num_scheduled_tokens.items():
            request = self.requests[request_id]
            prints = self._fingerprints(request)
            start, end = request.num_computed_tokens, request.num_computed_tokens + count
            for group, (table, window) in enumerate(zip(request.block_ids, self.windows, strict=True)):
                first = 0 if window is None else max(0, start - window + 1)
                for position in range(first, end):
                    slot = (table[position // self.block_size], position % self.block_size)
                    expected = (group, prints[position])
                    assert self.slots.get(slot) == expected, f"{request_id} reads foreign keys at {position}"

    def _sample(self, step: SchedulerOutput) -> ModelRunnerOutput:
        result = ModelRunnerOutput({})
        for request_id, count in step.num_scheduled_tokens.items():
            request = self.requests[request_id]
            start, end = request.num_computed_tokens, request.num_computed_tokens + count
            request.num_computed_tokens = end
            if request.sampling_params.prompt_logprobs is not None:
                scored = request.token_ids[start + 1 : min(end + 1, request.num_prompt_tokens)]
                if scored:
                    rows = LogprobRows([[t] for t in scored], [[-1.0] for _ in scored], [1 for _ in scored])
                    result.prompt_logprobs[request_id] = rows
            assert end <= len(request.token_ids)
            if end == len(request.token_ids):
                token = next_token(request_id, end)
                request.token_ids.append(token)
                result.sampled_token_ids[request_id] = [token]
        return result

    def _fingerprints(self, request: NewRequest) -> list[int]:
        prints = [hash(self.salts.get(request.req_id))]
        for token in request.token_ids:
            prints.append(hash((prints[-1], token)))
        return prints[1:]


class Engine:
    """Scheduler and played model in a loop; keeps what every client was told."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.runner = FakeRunner([g.spec for g in _groups(scheduler)], scheduler.kv.block_size)
        self.tokens: dict[str, list[int]] = {}
        self.last: dict[str, EngineCoreOutput] = {}
        self.outputs: dict[str, list[EngineCoreOutput]] = {}

    def add(self, request: EngineCoreRequest) -> None:
        self.runner.salts[request.request_id] = request.cache_salt
        self.scheduler.add_request(request)

    def step(self) -> SchedulerOutput:
        step = self.scheduler.schedule()
        self.finish_step(step)
        return step

    def finish_step(self, step: SchedulerOutput) -> None:
        self.take_in(step, self.runner.execute(step))

    def take_in(self, step: SchedulerOutput, result: ModelRunnerOutput) -> None:
        for outputs in self.scheduler.update_from_output(step, result).values():
            for output in outputs.outputs:
                assert output.new_token_ids or output.finish_reason is not None
                assert (last := self.last.get(output.request_id)) is None or last.finish_reason is None
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                self.outputs.setdefault(output.request_id, []).append(output)
                self.last[output.request_id] = output
        check_invariants(self.scheduler)

    def run(self, limit: int = 2000) -> None:
        """Step until nothing is left to do."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError(f"still unfinished after {limit} steps: {list(self.scheduler.requests)}")


def _groups(scheduler: Scheduler) -> list[KVCacheGroup]:
    out = []
    for group in scheduler.kv.groups:
        window = getattr(group, "window", None)
        size = group.block_size
        out.append(KVCacheGroup(("layer",), full(size) if window is None else sliding(window, size)))
    return out


def expected_output(request: EngineCoreRequest, max_model_len: int) -> tuple[list[int], FinishReason]:
    """What the request yields when nothing constrains it."""
    params, tokens = request.sampling_params, []
    position = len(request.prompt_token_ids)
    while True:
        token = next_token(request.request_id, position)
        tokens.append(token)
        position += 1
        eos = None if params.ignore_eos else params.eos_token_id
        if token == eos or token in params.stop_token_ids:
            return tokens, FinishReason.STOP
        if position >= max_model_len or len(tokens) >= (params.max_tokens or 1):
            return tokens, FinishReason.LENGTH


def check_invariants(scheduler: Scheduler) -> None:
    """I2 and I3 of the specification, and that index, free list and tables tell one story."""
    pool = scheduler.kv.pool
    holders: Counter[int] = Counter()
    for group in scheduler.kv.groups:
        assert set(group.tables) == {r.request_id for r in scheduler.running}
        for table in group.tables.values():
            live = [b.block_id for b in table if b is not pool.null_block]
            assert len(live) == len(set(live))
            holders.update(live)
    free = pool.free_list.ids()
    assert len(free) == len(set(free)) == pool.num_free
    for block in pool.blocks[1:]:
        assert block.ref_count == holders[block.block_id], block
        assert (block.ref_count == 0) == (block.block_id in set(free))
    assert len(holders) + pool.num_free == pool.num_blocks - 1
    indexed = {b.block_id: key for key, same in pool._cached.items() for b in same.values()}
    assert indexed == {b.block_id: b.key for b in pool.blocks if b.key is not None}
    assert pool.null_block.key is None
    for request in scheduler.running:
        assert request.status is RequestStatus.RUNNING
        if request.num_output_tokens and request.num_computed_tokens >= request.num_tokens - 1:
            assert request.num_computed_tokens == request.num_tokens - 1
    assert len(scheduler.running) + len(scheduler.waiting) == len(scheduler.requests)
    assert len(scheduler.running) <= scheduler.max_num_seqs


def make_request(prompt: list[int] | int, request_id: str = "r", **kwargs: object) -> Request:
    """A request outside any scheduler, without block hashes."""
    return Request(core_request(request_id, prompt, **kwargs))  # type: ignore[arg-type]
