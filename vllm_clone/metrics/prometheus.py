"""The `vllm:` series of /metrics, with vLLM's names, labels and buckets."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from prometheus_client import (
    GC_COLLECTOR,
    PLATFORM_COLLECTOR,
    PROCESS_COLLECTOR,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
)
from prometheus_client.multiprocess import MultiProcessCollector

from vllm_clone.config import CacheConfig, VllmConfig
from vllm_clone.messages import EngineReady, KVEviction, SchedulerStats
from vllm_clone.metrics.stats import FinishedRequestStats, IterationStats

LATENCY = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
FIRST_TOKEN = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
]  # fmt: skip
TOKEN_GAP = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
RESIDENCY = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800,
]  # fmt: skip
STEP_TOKENS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
PARAMS_N = [1, 2, 5, 10, 20]
PREEMPTIONS = [1, 2, 3, 4, 5, 10, 20]
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
REJECTIONS = ("max_num_queued_reqs", "max_num_queued_tokens")
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
CACHE_TIERS = ("device", "host", "p2p", "disk", "external_unspecified")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")


def one_two_five(limit: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 … up to ``limit``."""
    out: list[int] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > limit:
                return out
            out.append(step * scale)
        scale *= 10


class PrometheusMetrics:
    """Feeds the series from engine statistics; a StatLogger. One registry per server."""

    def __init__(self, registry: CollectorRegistry, model_name: str, max_model_len: int, engine: str = "0") -> None:
        self._registry = registry
        self._residency: tuple[Histogram, Histogram, Histogram] | None = None
        self._labels = {"model_name": model_name, "engine": engine}
        self._engine = engine
        tokens = one_two_five(max_model_len)
        self._estimates = {
            what: self._counter(f"vllm:estimated_{what}_per_gpu", f"Estimated {what.replace('_', ' ')} per device.")
            for what in ("flops", "read_bytes", "write_bytes")
        }
        self._running = self._gauge("vllm:num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests that wait to run.")
        self._waiting_by = self._split(_gauge, "vllm:num_requests_waiting_by_reason", "Waiting requests by reason.",
                                       "reason", ("capacity", "deferred"))  # fmt: skip
        sleep = self._split(_gauge, "vllm:engine_sleep_state", "1 for the state the engine is in.", "sleep_state",
                            SLEEP_STATES)  # fmt: skip
        sleep["awake"].set(1)
        self._usage = self._gauge("vllm:kv_cache_usage_perc", "Fraction of KV blocks in use, 0 to 1.")
        self._queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        for name, what in (("external_prefix_cache", "external prefix cache"), ("mm_cache", "multimodal cache")):
            self._counter(f"vllm:{name}_queries", f"Look-ups in the {what}.")
            self._counter(f"vllm:{name}_hits", f"Hits in the {what}.")
        self._preemptions = self._counter("vllm:num_preemptions", "Requests that lost their KV blocks for a while.")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests whose prefill is done.")
        self._by_source = self._split(Counter, "vllm:prompt_tokens_by_source", "Prompt tokens by where they came from.",
                                      "source", PROMPT_SOURCES)  # fmt: skip
        self._cached = self._counter("vllm:prompt_tokens_cached", "Prompt tokens that were not computed again.")
        self._cached_by = self._split(Counter, "vllm:prompt_tokens_cached_by_source", "Cached prompt tokens by tier.",
                                      "source", CACHE_TIERS)  # fmt: skip
        self._generated = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._finished = self._split(Counter, "vllm:request_success", "Finished sequences by reason.",
                                     "finished_reason", FINISH_REASONS)  # fmt: skip
        rejections = Counter("vllm:admission_rejections", "Requests a queue limit refused.", ["model_name", "reason"],
                             registry=registry)  # fmt: skip
        self._rejected = {r: rejections.labels(model_name=model_name, reason=r) for r in REJECTIONS}
        hist = self._histogram
        self._h_prompt = hist("vllm:request_prompt_tokens", "Prompt length of finished requests.", tokens)
        self._h_generation = hist("vllm:request_generation_tokens", "Output length of finished requests.", tokens)
        self._h_step = hist("vllm:iteration_tokens_total", "Tokens per engine step.", STEP_TOKENS)
        self._h_max_generation = hist("vllm:request_max_num_generation_tokens", "Longest sequence per request.", tokens)
        self._h_n = hist("vllm:request_params_n", "Sequences asked for per request.", PARAMS_N)
        self._h_max_tokens = hist("vllm:request_params_max_tokens", "Output limit per sequence.", tokens)
        self._h_first = hist("vllm:time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN)
        self._h_gap = hist("vllm:inter_token_latency_seconds", "Time between outputs of a sequence.", TOKEN_GAP)
        per_token = "Mean decode time per token after the first."
        self._h_per_token = hist("vllm:request_time_per_output_token_seconds", per_token, TOKEN_GAP)
        self._h_e2e = hist("vllm:e2e_request_latency_seconds", "Arrival to finish.", LATENCY)
        self._h_queue = hist("vllm:request_queue_time_seconds", "Queued to first scheduled.", LATENCY)
        self._h_inference = hist("vllm:request_inference_time_seconds", "First scheduled to last token.", LATENCY)
        self._h_prefill = hist("vllm:request_prefill_time_seconds", "First scheduled to first token.", LATENCY)
        self._h_decode = hist("vllm:request_decode_time_seconds", "First token to last token.", LATENCY)
        self._h_preemptions = hist("vllm:request_num_preemptions", "Preemptions per finished request.", PREEMPTIONS)
        computed = "Prompt tokens computed per finished request."
        self._h_computed = hist("vllm:request_prefill_kv_computed_tokens", computed, tokens)

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        """Take in one batch of engine outputs."""
        if scheduler is not None:
            self._running.set(scheduler.num_running)
            self._waiting.set(scheduler.num_waiting)
            self._waiting_by["capacity"].set(scheduler.num_waiting - scheduler.num_waiting_deferred)
            self._waiting_by["deferred"].set(scheduler.num_waiting_deferred)
            self._usage.set(scheduler.kv_cache_usage)
            self._queries.inc(scheduler.prefix_cache_queries)
            self._hits.inc(scheduler.prefix_cache_hits)
            self._cached_by["device"].inc(scheduler.prefix_cache_hits)
            self._preemptions.inc(scheduler.num_preemptions)
            for what, counter in self._estimates.items():
                counter.inc(getattr(scheduler, what))
            for eviction in scheduler.kv_evictions:
                self._record_eviction(eviction)
        self._generated.inc(iteration.num_generation_tokens)
        if iteration.num_prompt_tokens:
            self._prompt_tokens.inc(iteration.num_prompt_tokens)
            self._cached.inc(iteration.num_cached_tokens)
            self._by_source["local_compute"].inc(iteration.num_prompt_tokens - iteration.num_cached_tokens)
            self._by_source["local_cache_hit"].inc(iteration.num_cached_tokens)
        if iteration.num_computed_tokens:
            self._h_step.observe(iteration.num_computed_tokens)
        for histogram, values in (
            (self._h_first, iteration.time_to_first_token),
            (self._h_gap, iteration.inter_token_latency),
            (self._h_n, iteration.request_n),
            (self._h_max_generation, iteration.request_max_generation_tokens),
        ):
            for value in values:
                histogram.observe(value)
        for finished in iteration.finished:
            self._record_finished(finished)

    def record_rejection(self, reason: str) -> None:
        self._rejected[reason].inc()

    def record_ready(self, cache: CacheConfig, ready: EngineReady, max_concurrency: float) -> None:
        """Publish what the KV cache turned out to be: vllm:cache_config_info."""
        facts: dict[str, Any] = asdict(cache) | {
            "block_size": ready.block_size,
            "num_gpu_blocks": ready.num_blocks,
            "kv_cache_memory_bytes": ready.kv_cache_bytes,
            "cache_dtype": ready.cache_dtype,
            "kv_cache_size_tokens": int(max_concurrency * ready.max_model_len),
            "kv_cache_max_concurrency": f"{max_concurrency:.2f}",
        }
        labels = {"engine": self._engine} | {k: str(v) for k, v in facts.items()}
        gauge = _gauge(
            "vllm:cache_config_info", "Facts about the KV cache, as labels.", list(labels), registry=self._registry
        )
        gauge.labels(**labels).set(1)

    def _record_eviction(self, eviction: KVEviction) -> None:
        assert self._residency is not None, "track_residency comes first"
        lifetime, idle, gap = self._residency
        lifetime.observe(eviction.lifetime)
        idle.observe(eviction.idle)
        for seconds in eviction.reuse_gaps:
            gap.observe(seconds)

    def track_residency(self) -> None:
        """Show the series of --kv-cache-metrics."""
        hist = self._histogram
        self._residency = (
            hist("vllm:kv_block_lifetime_seconds", "Allocation of a KV block to its eviction.", RESIDENCY),
            hist("vllm:kv_block_idle_before_evict_seconds", "Last use of a KV block to its eviction.", RESIDENCY),
            hist("vllm:kv_block_reuse_gap_seconds", "Between two uses of a KV block.", RESIDENCY),
        )

    def _record_finished(self, request: FinishedRequestStats) -> None:
        self._finished[request.finish_reason].inc()
        self._h_prompt.observe(request.num_prompt_tokens)
        self._h_generation.observe(request.num_generation_tokens)
        self._h_max_tokens.observe(request.max_tokens)
        self._h_per_token.observe(request.time_per_output_token)
        self._h_e2e.observe(request.e2e_latency)
        self._h_queue.observe(request.queued_time)
        self._h_prefill.observe(request.prefill_time)
        self._h_decode.observe(request.decode_time)
        self._h_inference.observe(request.inference_time)
        self._h_preemptions.observe(request.num_preemptions)
        self._h_computed.observe(request.num_prompt_tokens - request.num_cached_tokens)

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(name, help, list(self._labels), registry=self._registry).labels(**self._labels)

    def _gauge(self, name: str, help: str) -> Gauge:
        return _gauge(name, help, list(self._labels), registry=self._registry).labels(**self._labels)

    def _histogram(self, name: str, help: str, buckets: Iterable[float]) -> Histogram:
        labels = list(self._labels)
        return Histogram(name, help, labels, registry=self._registry, buckets=list(buckets)).labels(**self._labels)

    def _split(self, kind: Any, name: str, help: str, label: str, values: Iterable[str]) -> dict[str, Any]:
        """One child per value of an extra label, all visible from the start."""
        family = kind(name, help, [*self._labels, label], registry=self._registry)
        return {value: family.labels(**self._labels, **{label: value}) for value in values}


def _gauge(name: str, help: str, labels: list[str], registry: CollectorRegistry) -> Gauge:
    """A gauge of which, among several API servers, the value set last shows."""
    return Gauge(name, help, labels, registry=registry, multiprocess_mode="mostrecent")


def make_metrics(config: VllmConfig, registry: CollectorRegistry) -> PrometheusMetrics:
    """The series that a configuration asks for."""
    model = config.model_config
    names = model.served_model_name or [model.model]
    metrics = PrometheusMetrics(registry, names[0], model.max_model_len or 0)
    if config.observability_config.kv_cache_metrics:
        metrics.track_residency()
    return metrics


def shared_registries() -> tuple[CollectorRegistry, CollectorRegistry]:
    """For one of several API servers: where its series belong, and what shows the series of all of them.

    The environment variable PROMETHEUS_MULTIPROC_DIR must have been set before this process began.
    """
    shown = CollectorRegistry()
    MultiProcessCollector(shown)
    return CollectorRegistry(), shown


def new_registry() -> CollectorRegistry:
    """A registry with the python_* and process_* series."""
    registry = CollectorRegistry()
    for collector in (GC_COLLECTOR, PLATFORM_COLLECTOR, PROCESS_COLLECTOR):
        registry.register(collector)
    return registry


class HTTPMetrics:
    """The http_* series, named and labelled as vLLM's are."""

    def __init__(self, registry: CollectorRegistry) -> None:
        from prometheus_client import Summary

        fine = [
            0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60,
        ]  # fmt: skip
        self.requests = Counter("http_requests", "Requests by handler, method and status class.",
                                ["handler", "method", "status"], registry=registry)  # fmt: skip
        self.request_size = Summary("http_request_size_bytes", "Request sizes.", ["handler"], registry=registry)
        self.response_size = Summary("http_response_size_bytes", "Response sizes.", ["handler"], registry=registry)
        self.duration = Histogram("http_request_duration_highr_seconds", "Request durations.", registry=registry,
                                  buckets=fine)  # fmt: skip
        self.duration_by = Histogram("http_request_duration_seconds", "Request durations by handler.",
                                     ["handler", "method"], registry=registry, buckets=[0.1, 0.5, 1])  # fmt: skip

    def record(
        self, handler: str, method: str, status: int, request_bytes: int, response_bytes: int, seconds: float
    ) -> None:
        self.requests.labels(handler=handler, method=method, status=f"{status // 100}xx").inc()
        self.request_size.labels(handler=handler).observe(request_bytes)
        self.response_size.labels(handler=handler).observe(response_bytes)
        self.duration.observe(seconds)
        self.duration_by.labels(handler=handler, method=method).observe(seconds)
