"""The series by themselves, without a server around them."""

import asyncio

import httpx
import pytest
from prometheus_client import CollectorRegistry

from tests.entrypoints.http_server import http_config
from tests.entrypoints.preparer import Preparer
from vllm_clone.config import FrontendConfig
from vllm_clone.entrypoints.launchers.app import build_app
from vllm_clone.messages import KVEviction, SchedulerStats
from vllm_clone.metrics.prometheus import HTTPMetrics, PrometheusMetrics, new_registry, one_two_five
from vllm_clone.metrics.stats import FinishedRequestStats, IterationStats

LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def finished(reason: str = "stop", tokens: int = 5) -> FinishedRequestStats:
    return FinishedRequestStats(
        finish_reason=reason, num_prompt_tokens=20, num_cached_tokens=16, num_generation_tokens=tokens, max_tokens=8,
        num_preemptions=1, e2e_latency=2.0, queued_time=0.5, prefill_time=0.25, decode_time=1.0, inference_time=1.25,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("limit", "edges"), [(1, [1]), (2, [1, 2]), (4, [1, 2]), (100, [1, 2, 5, 10, 20, 50, 100]), (99, one_two_five(50))]
)
def test_token_buckets_follow_the_context(limit: int, edges: list[int]) -> None:
    assert one_two_five(limit) == edges


@pytest.mark.parametrize("max_model_len", [1, 2048])
def test_any_context_length_has_buckets(registry: CollectorRegistry, max_model_len: int) -> None:
    PrometheusMetrics(registry, "m", max_model_len).record(None, IterationStats(finished=[finished()]))
    assert registry.get_sample_value("vllm:request_prompt_tokens_count", LABELS) == 1


def test_all_values_are_there_before_any_traffic(registry: CollectorRegistry) -> None:
    PrometheusMetrics(registry, "m", 100)
    for reason in ("stop", "length", "abort", "error", "repetition"):
        labels = LABELS | {"finished_reason": reason}
        assert registry.get_sample_value("vllm:request_success_total", labels) == 0
    for state, value in (("awake", 1), ("weights_offloaded", 0), ("discard_all", 0)):
        assert registry.get_sample_value("vllm:engine_sleep_state", LABELS | {"sleep_state": state}) == value
    rejections = {"model_name": "m", "reason": "max_num_queued_reqs"}
    assert registry.get_sample_value("vllm:admission_rejections_total", rejections) == 0


def test_gauges_show_the_newest_state_and_counters_add_up(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(registry, "m", 100)
    for running in (3, 2):
        stats = SchedulerStats(
            num_running=running, num_waiting=5, num_waiting_deferred=2, kv_cache_usage=0.5, prefix_cache_queries=10,
            prefix_cache_hits=4, num_preemptions=1,
        )  # fmt: skip
        metrics.record(stats, IterationStats(num_generation_tokens=7))
    metrics.record(None, IterationStats())  # says nothing about the engine's state
    expected = {
        "num_requests_running": 2, "num_requests_waiting": 5, "kv_cache_usage_perc": 0.5,
        "prefix_cache_queries_total": 20, "prefix_cache_hits_total": 8, "num_preemptions_total": 2,
        "generation_tokens_total": 14,
    }  # fmt: skip
    assert {name: registry.get_sample_value(f"vllm:{name}", LABELS) for name in expected} == expected
    by_reason = {
        reason: registry.get_sample_value("vllm:num_requests_waiting_by_reason", LABELS | {"reason": reason})
        for reason in ("capacity", "deferred")
    }
    assert by_reason == {"capacity": 3, "deferred": 2}


def test_a_finished_sequence_fills_every_histogram_of_the_end(registry: CollectorRegistry) -> None:
    PrometheusMetrics(registry, "m", 100).record(None, IterationStats(finished=[finished("repetition")]))
    expected = {
        "request_prompt_tokens": 20, "request_generation_tokens": 5, "request_params_max_tokens": 8,
        "request_time_per_output_token_seconds": 0.25, "e2e_request_latency_seconds": 2,
        "request_queue_time_seconds": 0.5, "request_prefill_time_seconds": 0.25, "request_decode_time_seconds": 1,
        "request_inference_time_seconds": 1.25, "request_num_preemptions": 1,
        "request_prefill_kv_computed_tokens": 4,
    }  # fmt: skip
    assert {name: registry.get_sample_value(f"vllm:{name}_sum", LABELS) for name in expected} == expected
    ended = LABELS | {"finished_reason": "repetition"}
    assert registry.get_sample_value("vllm:request_success_total", ended) == 1


def test_one_token_has_no_time_per_output_token() -> None:
    assert finished(tokens=1).time_per_output_token == 0


def test_http_statuses_are_counted_by_class(registry: CollectorRegistry) -> None:
    metrics = HTTPMetrics(registry)
    for status in (200, 201, 404, 503):
        metrics.record("/x", "GET", status, 10, 20, 0.2)
    counts = {
        status: registry.get_sample_value("http_requests_total", {"handler": "/x", "method": "GET", "status": status})
        for status in ("2xx", "4xx", "5xx")
    }
    assert counts == {"2xx": 2, "4xx": 1, "5xx": 1}
    assert registry.get_sample_value("http_request_size_bytes_sum", {"handler": "/x"}) == 40
    assert registry.get_sample_value("http_response_size_bytes_sum", {"handler": "/x"}) == 80
    assert registry.get_sample_value("http_request_duration_highr_seconds_bucket", {"le": "0.25"}) == 4


def test_without_statistics_only_process_and_http_series_are_shown() -> None:
    """--disable-log-stats: nothing has registered the model's series."""
    app = build_app(Preparer(), http_config(), FrontendConfig(), new_registry())  # type: ignore[arg-type]

    async def scrape() -> str:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            assert (await client.get("/v1/models")).status_code == 200
            return (await client.get("/metrics")).text

    text = asyncio.run(scrape())
    assert "vllm:" not in text
    for name in ("python_info", "process_open_fds", 'http_requests_total{handler="/v1/models",method="GET"'):
        assert name in text


def test_estimates_and_lives_of_blocks_are_shown(registry: CollectorRegistry) -> None:
    metrics = PrometheusMetrics(registry, "m", 64)
    assert registry.get_sample_value("vllm:kv_block_lifetime_seconds_count", LABELS) is None
    metrics.track_residency()
    evictions = [KVEviction(3.0, 1.0, [0.5, 1.5]), KVEviction(5.0, 2.0)]
    metrics.record(SchedulerStats(flops=8.0, read_bytes=4.0, write_bytes=2.0, kv_evictions=evictions), IterationStats())
    shown = {
        "vllm:estimated_flops_per_gpu_total": 8, "vllm:estimated_read_bytes_per_gpu_total": 4,
        "vllm:estimated_write_bytes_per_gpu_total": 2, "vllm:kv_block_lifetime_seconds_sum": 8,
        "vllm:kv_block_idle_before_evict_seconds_sum": 3, "vllm:kv_block_reuse_gap_seconds_sum": 2,
        "vllm:kv_block_reuse_gap_seconds_count": 2,
    }  # fmt: skip
    for name, value in shown.items():
        assert registry.get_sample_value(name, LABELS) == value, name
