"""EngineCore: an executor and a scheduler that turn together, one synchronous step at a time."""

import queue
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vllm_clone.config import VllmConfig
from vllm_clone.config.kv_cache import KVCacheConfig, KVCacheGroup, group_layers
from vllm_clone.config.kv_events import kv_events_options
from vllm_clone.config.named_code import import_named
from vllm_clone.core.cost import CostModel
from vllm_clone.core.kv_cache.manager import KVCacheManager
from vllm_clone.core.kv_events import KVEventPublisher
from vllm_clone.core.sched.scheduler import Scheduler
from vllm_clone.core.structured_output.manager import GrammarManager
from vllm_clone.errors import ConfigError
from vllm_clone.executor.base import Executor
from vllm_clone.logger import init_logger
from vllm_clone.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineReady,
    FinishReason,
    SchedulerStats,
    StepCounts,
)
from vllm_clone.step import SchedulerOutput

logger = init_logger(__name__)

ExecutorFactory = Callable[[VllmConfig], Executor]

UTILITIES = frozenset({"ping", "reset_prefix_cache", "get_state", "check_executor", "collective_rpc", "profile"})
"""Methods of :class:`EngineCore` that a client may call by name."""


class EngineCore:
    """The engine without its processes: requests go in, a step at a time comes out.

    Only the thread that steps may call it, except for :attr:`late_aborts`.

    Raises:
        ConfigError: the KV cache cannot hold one request of ``max_model_len`` tokens.
    """

    def __init__(self, config: VllmConfig, executor_factory: ExecutorFactory) -> None:
        begun = time.monotonic()
        self.config = config
        self.executor = executor_factory(config)
        self.late_aborts: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
        """Request ids to abort, put by any thread; also looked at between a forward pass and its results."""
        try:
            self.executor.load_model()
            self.kv_cache_config = self._plan_kv_cache()
            self.executor.initialize_kv_cache(self.kv_cache_config)
            named = config.scheduler_config.scheduler_cls
            scheduler_class: type[Scheduler] = import_named("--scheduler-cls", named) if named else Scheduler
            self.scheduler = scheduler_class(config, self.kv_cache_config)
            self.grammars = self.scheduler.grammars = GrammarManager(config)
            options = kv_events_options(config.kv_events_config)
            self._publisher = KVEventPublisher(options) if options is not None else None
        except BaseException:
            self.executor.shutdown()
            raise
        self.load_seconds = time.monotonic() - begun
        self._log_iterations = config.observability_config.enable_logging_iteration_details
        self._iterations, self._iteration_end = 0, time.monotonic()
        self._steps = StepCounts() if config.observability_config.cudagraph_metrics else None
        self._cost_model, self._costs = self._make_cost_model(), [0.0, 0.0, 0.0]
        self._log_stats = not config.observability_config.disable_log_stats
        self._report_size()

    # ---- requests ----

    def add_request(self, request: EngineCoreRequest) -> EngineCoreOutput | None:
        """Queue a request; the error output for its client when it cannot be taken in."""
        if request.request_id in self.scheduler.requests:
            logger.error("Request id %s is in use; the second request of that name is dropped.", request.request_id)
            return None
        try:
            self.scheduler.add_request(request)
        except Exception as error:
            logger.exception("Request %s could not be added", request.request_id)
            return EngineCoreOutput(
                request.request_id, [], FinishReason.ERROR, error=f"{type(error).__name__}: {error}"
            )
        return None

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """Free requests; unknown and finished ids are ignored. Nothing is sent for them."""
        self.scheduler.finish_requests(request_ids)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything. Requests that wait for their grammar alone are no work."""
        return self.scheduler.has_work

    @property
    def num_unfinished(self) -> int:
        return self.scheduler.num_unfinished

    def wait_for_grammars(self) -> None:
        """Return when a step would do something, or nothing is left to do: only grammars can be what is missing."""
        self.grammars.wait(lambda: self.has_work or not self.num_unfinished)

    def step(self) -> dict[int, EngineCoreOutputs]:
        """Schedule, execute, take in the results.

        Returns:
            Outputs per client index; client 0 is also told the scheduler's state when statistics are on.
        """
        work = self.scheduler.schedule()
        if self.scheduler.constrained:
            work.grammar = self.grammars.masks(work, self.scheduler.constrained)
        if self._cost_model is not None:
            self._add_costs(self._cost_model, work)
        result = self.executor.execute_model(work)
        self._take_late_aborts()
        outputs = self.scheduler.update_from_output(work, result)
        self._publish_kv_events()
        if self._log_iterations:
            self._log_iteration(work)
        if self._steps is not None:
            _count_step(self._steps, work.total_num_scheduled_tokens, result.replayed)
        if self._log_stats:
            first = outputs.get(0)
            if first is None:
                first = outputs[0] = EngineCoreOutputs(timestamp=time.monotonic())
            first.scheduler_stats = self._make_stats()
        return outputs

    def use_idle_time(self) -> bool:
        """Do a few milliseconds of what can be done ahead of requests; whether there is more to do."""
        return self.executor.use_idle_time()

    def shutdown(self) -> None:
        self.grammars.close()
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        self.executor.shutdown()

    # ---- utilities ----

    def call(self, method: str, args: list[Any]) -> Any:
        """Run one of :data:`UTILITIES`.

        Raises:
            ValueError: no such utility.
        """
        if method not in UTILITIES:
            raise ValueError(f"the engine has no utility {method!r}; it has {', '.join(sorted(UTILITIES))}")
        return getattr(self, method)(*args)

    def ping(self) -> bool:
        """Answered by a loop that turns."""
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while a request holds blocks."""
        done = self.scheduler.reset_prefix_cache()
        self._publish_kv_events()
        return done

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of every worker by name; their answers."""
        return self.executor.collective_rpc(method, args, kwargs)

    def profile(self, is_start: bool) -> None:
        """Begin a trace of steps on every worker, or end it."""
        self.collective_rpc("profile", [is_start])

    def check_executor(self) -> bool:
        self.executor.check_health()
        return True

    def get_state(self) -> dict[str, Any]:
        """Counts for debugging: requests by state, free and total blocks."""
        scheduler = self.scheduler
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "free_blocks": scheduler.kv.pool.num_free,
            "num_blocks": self.kv_cache_config.num_blocks,
        }

    def ready_message(self, pid: int) -> EngineReady:
        kv, model = self.kv_cache_config, self.config.model_config
        assert isinstance(model.max_model_len, int)
        return EngineReady(
            num_blocks=kv.num_blocks,
            block_size=kv.groups[0].spec.block_size,
            max_model_len=model.max_model_len,
            cache_dtype=kv.groups[0].spec.dtype,
            kv_cache_bytes=kv.num_blocks * kv.bytes_per_block,
            weight_bytes=self.executor.weight_bytes,
            load_seconds=self.load_seconds,
            pid=pid,
        )

    # ---- parts ----

    def _publish_kv_events(self) -> None:
        if self._publisher is not None and self.scheduler.kv_events is not None:
            self._publisher.publish(self.scheduler.kv_events.take())

    def _make_stats(self) -> SchedulerStats:
        """The scheduler's state and counts, and what this class counts since the last call."""
        stats = self.scheduler.make_stats()
        if self._steps is not None:
            stats.steps, self._steps = self._steps, StepCounts()
        stats.flops, stats.read_bytes, stats.write_bytes = self._costs
        self._costs = [0.0, 0.0, 0.0]
        return stats

    def _make_cost_model(self) -> CostModel | None:
        if not self.config.observability_config.enable_mfu_metrics:
            return None
        hf = self.config.model_config.hf_config
        try:
            return CostModel(hf, self.kv_cache_config, self.executor.weight_bytes)
        except KeyError as error:
            raise ConfigError(
                f"--enable-mfu-metrics: config.json does not state {error.args[0]}, so that operations cannot be "
                "counted; leave the flag out."
            ) from error

    def _add_costs(self, model: CostModel, work: SchedulerOutput) -> None:
        requests = self.scheduler.requests
        ends = ((requests[i].num_computed_tokens, count) for i, count in work.num_scheduled_tokens.items())
        cost = model.step((end - count, end) for end, count in ends)
        for i, part in enumerate((cost.flops, cost.read_bytes, cost.write_bytes)):
            self._costs[i] += part

    def _log_iteration(self, work: SchedulerOutput) -> None:
        """One line: what the step computed, and the time since the one before."""
        begun, self._iteration_end = self._iteration_end, time.monotonic()
        self._iterations += 1
        counts = work.num_scheduled_tokens.values()
        decodes = sum(count == 1 for count in counts)
        logger.info(
            "Iteration %d: %d prefill requests with %d tokens, %d decode requests, %.2f ms", self._iterations,
            len(counts) - decodes, sum(counts) - decodes, decodes, (self._iteration_end - begun) * 1000,
        )  # fmt: skip

    def _take_late_aborts(self) -> None:
        try:
            while True:
                self.abort_requests(self.late_aborts.get_nowait())
        except queue.Empty:
            return

    def _plan_kv_cache(self) -> KVCacheConfig:
        groups = group_layers(self.executor.get_kv_cache_specs())
        return plan_kv_cache(self.config, groups, self.executor.determine_available_memory())

    def _report_size(self) -> None:
        kv, longest = self.kv_cache_config, self.scheduler.max_model_len
        per_request = self.scheduler.kv.max_blocks(longest)
        concurrency = (kv.num_blocks - 1) / per_request
        logger.info(
            "KV cache: %s tokens (%.2f GiB); maximum concurrency for %s tokens per request: %.2fx",
            f"{int(concurrency * longest):,}", kv.num_blocks * kv.bytes_per_block / 2**30, f"{longest:,}", concurrency,
        )  # fmt: skip
        logger.info("Engine initialised in %.2f s", self.load_seconds)


def _count_step(counts: StepCounts, num_tokens: int, replayed: bool) -> None:
    if not num_tokens:
        return
    if replayed:
        counts.replayed += 1
        counts.replayed_tokens += num_tokens
    else:
        counts.direct += 1
        counts.direct_tokens += num_tokens


def plan_kv_cache(config: VllmConfig, groups: tuple[KVCacheGroup, ...], available_bytes: int) -> KVCacheConfig:
    """Number of blocks for ``available_bytes`` (or the override), checked against ``max_model_len``.

    Where the configuration lets the engine fit it, ``max_model_len`` is lowered to what the blocks hold.

    Raises:
        ConfigError: one request of ``max_model_len`` tokens does not fit; says what would.
    """
    max_model_len, budget = config.model_config.max_model_len, config.scheduler_config.max_num_batched_tokens
    assert isinstance(max_model_len, int)
    assert budget is not None
    block_bytes = KVCacheConfig(0, groups).bytes_per_block
    num_blocks = config.cache_config.num_gpu_blocks_override or available_bytes // block_bytes
    sizes = KVCacheManager(KVCacheConfig(1, groups), max_model_len, False, budget)
    needed = sizes.max_blocks(max_model_len)
    usable = num_blocks - 1  # block 0 is never handed out
    if needed <= usable:
        return KVCacheConfig(num_blocks, groups)
    low, high = 0, max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if sizes.max_blocks(middle) <= usable else (low, middle - 1)
    if low and config.model_config.fit_max_model_len:
        config.model_config.max_model_len = low
        logger.info("max_model_len is lowered from %d to %d tokens, which the KV cache holds.", max_model_len, low)
        return KVCacheConfig(num_blocks, groups)
    flag = "--num-gpu-blocks-override" if config.cache_config.num_gpu_blocks_override else "--kv-cache-memory-bytes"
    fits = f"--max-model-len of at most {low}" if low else "a larger cache; not even one block fits"
    raise ConfigError(
        f"One request of max_model_len {max_model_len} tokens needs {_mib((needed + 1) * block_bytes)} of KV cache "
        f"and {_mib(max(num_blocks, 0) * block_bytes)} are available; raise {flag} "
        f"{'or use' if low else 'for'} {fits}."
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"
