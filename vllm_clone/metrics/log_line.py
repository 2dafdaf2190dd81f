"""The periodic statistics line in the log."""

import logging
import time
from collections import deque
from collections.abc import Callable

from vllm_clone.logger import init_logger
from vllm_clone.messages import SchedulerStats, StepCounts
from vllm_clone.metrics.stats import IterationStats

logger = init_logger(__name__)

HIT_RATE_REQUESTS = 1000
"""The prefix cache hit rate looks back over about this many steps with look-ups."""


class StatLine:
    """Counts between two lines; a StatLogger. Call :meth:`log` at the interval."""

    def __init__(self, device: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._device = {"cuda": "GPU"}.get(device, device.upper())
        self._clock = clock
        self._since = clock()
        self._prompt = self._generated = self._preemptions = 0
        self._state = SchedulerStats()
        self._lookups: deque[tuple[int, int]] = deque(maxlen=HIT_RATE_REQUESTS)
        self._was_idle = False
        self._steps: StepCounts | None = None

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        self._prompt += iteration.num_prompt_tokens - iteration.num_cached_tokens
        self._generated += iteration.num_generation_tokens
        if scheduler is not None:
            self._state = scheduler
            self._preemptions += scheduler.num_preemptions
            if scheduler.steps is not None:
                self._add_steps(scheduler.steps)
            if scheduler.prefix_cache_queries:
                self._lookups.append((scheduler.prefix_cache_queries, scheduler.prefix_cache_hits))

    def record_rejection(self, reason: str) -> None:
        """Rejections show in /metrics only."""

    def log(self) -> None:
        """Write the line and start the next interval. An idle server writes one line, then goes quiet."""
        now = self._clock()
        seconds, self._since = max(now - self._since, 1e-9), now
        idle = not self._prompt and not self._generated
        level = logging.DEBUG if idle and self._was_idle else logging.INFO
        self._was_idle = idle
        logger.log(level, "%s", self.line(seconds))
        if self._steps is not None:
            logger.log(level, "%s", self.steps_line())
            self._steps = StepCounts()
        self._prompt = self._generated = self._preemptions = 0

    def _add_steps(self, more: StepCounts) -> None:
        steps = self._steps = self._steps or StepCounts()
        for name in StepCounts.__struct_fields__:
            setattr(steps, name, getattr(steps, name) + getattr(more, name))

    def steps_line(self) -> str:
        """How the interval's steps ran: the line of --cudagraph-metrics."""
        steps = self._steps or StepCounts()
        return (
            f"Engine 000: Steps replayed: {steps.replayed} with {steps.replayed_tokens} tokens, "
            f"through Python: {steps.direct} with {steps.direct_tokens} tokens"
        )

    def line(self, seconds: float) -> str:
        """The line for an interval of ``seconds``."""
        state = self._state
        parts = [
            f"Avg prompt throughput: {self._prompt / seconds:.1f} tokens/s",
            f"Avg generation throughput: {self._generated / seconds:.1f} tokens/s",
            f"Running: {state.num_running} reqs",
            f"Waiting: {state.num_waiting} reqs",
        ]
        if state.num_waiting_deferred:
            parts.append(f"Deferred: {state.num_waiting_deferred} reqs")
        if self._preemptions:
            parts.append(f"Preemptions: {self._preemptions}")
        parts.append(f"{self._device} KV cache usage: {state.kv_cache_usage * 100:.1f}%")
        queries = sum(q for q, _ in self._lookups)
        if queries:
            parts.append(f"Prefix cache hit rate: {sum(h for _, h in self._lookups) / queries * 100:.1f}%")
        return "Engine 000: " + ", ".join(parts)
