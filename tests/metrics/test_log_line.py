"""The periodic statistics line."""

import logging

from tests.entrypoints.http_server import logged
from vllm_clone.messages import SchedulerStats, StepCounts
from vllm_clone.metrics.log_line import StatLine
from vllm_clone.metrics.stats import IterationStats

NAME = "vllm_clone.metrics.log_line"


def test_rates_are_over_the_interval_and_without_cached_tokens():
    now = [0.0]
    line = StatLine("cpu", lambda: now[0])
    line.record(SchedulerStats(num_running=2, num_waiting=1, kv_cache_usage=0.25), IterationStats(10, 110, 10))
    now[0] = 10.0
    with logged(NAME) as messages:
        line.log()
    assert messages == [
        "Engine 000: Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 1.0 tokens/s, "
        "Running: 2 reqs, Waiting: 1 reqs, CPU KV cache usage: 25.0%"
    ]


def test_optional_parts():
    line = StatLine("cuda")
    stats = SchedulerStats(num_waiting_deferred=3, num_preemptions=2, prefix_cache_queries=8, prefix_cache_hits=2)
    line.record(stats, IterationStats())
    line.record(None, IterationStats())
    assert line.line(1.0).endswith(
        "Waiting: 0 reqs, Deferred: 3 reqs, Preemptions: 2, GPU KV cache usage: 0.0%, Prefix cache hit rate: 25.0%"
    )


def test_an_idle_server_writes_one_line_then_goes_quiet():
    line = StatLine("cpu")
    levels = []
    handler = logging.Handler()
    handler.emit = lambda record: levels.append(record.levelno)  # type: ignore[method-assign]
    logger = logging.getLogger(NAME)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        line.log()
        line.log()
        line.record(None, IterationStats(1))
        line.log()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert levels == [logging.INFO, logging.DEBUG, logging.INFO]


def test_steps_are_counted_by_how_they_ran_when_the_engine_tells():
    line = StatLine("cpu")
    line.record(SchedulerStats(steps=StepCounts(2, 20, 1, 300)), IterationStats(1))
    line.record(SchedulerStats(steps=StepCounts(1, 5, 0, 0)), IterationStats(1))
    with logged(NAME) as messages:
        line.log()
        line.record(None, IterationStats(1))
        line.log()
    assert messages[1] == "Engine 000: Steps replayed: 3 with 25 tokens, through Python: 1 with 300 tokens"
    assert messages[3] == "Engine 000: Steps replayed: 0 with 0 tokens, through Python: 0 with 0 tokens"
