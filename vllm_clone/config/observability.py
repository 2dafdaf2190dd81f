"""What the server tells about itself."""

from dataclasses import dataclass
from typing import Literal

from vllm_clone.config.flags import (
    flag,
)
from vllm_clone.config.support import gpu_only, later, not_here


@dataclass
class ObservabilityConfig:
    """What the server tells about itself."""

    show_hidden_metrics_for_version: str | None = flag(
        None,
        "Show metrics that were hidden as deprecated in the given release, if that was the previous minor.",
        nullable=True,
        support=not_here("no metric is hidden"),
    )
    otlp_traces_endpoint: str | None = flag(
        None, "OpenTelemetry collector URL for request spans.", nullable=True, support=later("OpenTelemetry traces")
    )
    collect_detailed_traces: list[Literal["model", "worker", "all"]] | None = flag(
        None,
        "Add timings of the model forward and/or the worker call to traces.",
        nullable=True,
        support=later("OpenTelemetry traces"),
    )
    per_request_spec_decode_metrics: Literal["detailed", "none", "summary"] = flag(
        "none",
        (
            "Add acceptance statistics to responses: summary = mean length, rate and histogram; detailed = "
            "per-step arrays as well."
        ),
        support=later("Speculative decoding methods"),
    )
    kv_cache_metrics: bool = flag(
        False,
        "Histograms of KV block lifetime, idle time and reuse gap from a sample of blocks.",
    )
    kv_cache_metrics_sample: float = flag(0.01, "Fraction of blocks sampled, in (0, 1].")
    cudagraph_metrics: bool = flag(
        False,
        "Log how many steps were replayed and how many ran through Python, with their tokens.",
    )
    enable_layerwise_nvtx_tracing: bool = flag(
        False, "Wrap each module in an NVTX range with shapes.", support=gpu_only("NVTX ranges")
    )
    enable_mfu_metrics: bool = flag(False, "Export estimated FLOPs and bytes per device computed from model shape.")
    enable_logging_iteration_details: bool = flag(
        False, "Log per engine step how many prefill and decode requests and tokens ran and the CPU time."
    )
    jit_monitor_mode: Literal["error", "warn"] = flag(
        "warn",
        "Reaction to kernels compiled after warm-up: log or raise.",
        support=not_here("nothing is compiled at run time"),
    )
    jit_monitor_verbose: bool = flag(
        False, "Log every such compilation in detail.", support=not_here("nothing is compiled at run time")
    )
    disable_log_stats: bool = flag(
        False, "No vllm metrics and no periodic statistics line.", one_way=True, heading="VllmConfig"
    )
    enable_log_requests: bool = flag(False, "Log every request.", heading="AsyncEngineArgs")
