"""How many devices and engines work together."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from vllm_clone.config.flags import (
    comma_separated,
    flag,
)
from vllm_clone.config.support import gpu_only, later

All2allBackend = Literal[
    "allgather_reducescatter",
    "naive",
    "pplx",
    "deepep_high_throughput",
    "deepep_low_latency",
    "deepep_v2",
    "mori_high_throughput",
    "mori_low_latency",
    "moonep",
    "nixl_ep",
    "flashinfer_all2allv",
    "flashinfer_nvlink_two_sided",
    "flashinfer_nvlink_one_sided",
]


@dataclass
class ParallelConfig:
    """How many devices work together."""

    distributed_executor_backend: str | None = flag(
        None,
        "How workers are launched: mp, ray, uni (in the engine's process) or external_launcher.",
        nullable=True,
        support=later("Tensor and pipeline parallel workers"),
        working=("uni",),
        known=(
            "ray",
            "mp",
            "uni",
            "external_launcher",
        ),
    )
    pipeline_parallel_size: int = flag(
        1,
        "Groups of layers on different devices.",
        aliases=("-pp",),
        support=later("Tensor and pipeline parallel workers"),
    )
    master_addr: str = flag(
        "127.0.0.1",
        "Rendezvous address for mp executors that span nodes; also the default DP address.",
        support=later("Tensor and pipeline parallel workers"),
    )
    master_port: int = flag(
        29501,
        "Rendezvous port for mp executors that span nodes.",
        support=later("Tensor and pipeline parallel workers"),
    )
    nnodes: int = flag(
        1,
        "Number of machines the mp deployment spans.",
        aliases=("-n",),
        support=later("Tensor and pipeline parallel workers"),
    )
    node_rank: int = flag(
        0, "Zero-based index of this machine.", aliases=("-r",), support=later("Tensor and pipeline parallel workers")
    )
    distributed_timeout_seconds: int | None = flag(
        None,
        "Timeout for device process-group operations.",
        nullable=True,
        support=later("Tensor and pipeline parallel workers"),
    )
    cpu_distributed_timeout_seconds: int | None = flag(
        None,
        "Timeout for CPU (gloo) groups, including the DP synchronisation group.",
        nullable=True,
        support=later("Tensor and pipeline parallel workers"),
    )
    numa_bind: bool = flag(False, "Keep the engine's threads and memory on one NUMA node.")
    numa_bind_nodes: list[int] | None = flag(
        None, "NUMA node of each rank; the one with most cores by default.", nullable=True
    )
    numa_bind_cpus: list[str] | None = flag(
        None, "Cores of each rank, such as 0-3 or 0,2,4-7, instead of all cores of its NUMA node.", nullable=True
    )
    device_ids: Annotated[list[str], comma_separated] | None = flag(
        None,
        "Comma-separated GPU indices or UUIDs to use without hiding the other GPUs from the process.",
        support=gpu_only("Device numbers"),
    )
    tensor_parallel_size: int = flag(
        1, "Devices that share each layer.", aliases=("-tp",), support=later("Tensor and pipeline parallel workers")
    )
    decode_context_parallel_size: int = flag(
        1,
        "Ranks that share the KV cache of one sequence by token position during decode; adds no processes.",
        aliases=("-dcp",),
        support=later("Tensor and pipeline parallel workers"),
    )
    dcp_comm_backend: Literal["a2a", "ag_rs"] | None = flag(
        None,
        (
            "Collective used to merge partial attention: ag_rs = all-gather + reduce-scatter, a2a = all-to-all of "
            "outputs and log-sum-exp."
        ),
        nullable=True,
        support=later("Tensor and pipeline parallel workers"),
    )
    dcp_q_replicate: bool | None = flag(
        None,
        "Keep a full copy of the MLA query projection on each DCP rank so decode skips the query all-gather.",
        support=later("Tensor and pipeline parallel workers"),
    )
    dcp_kv_cache_interleave_size: int = flag(
        1, "Old name of the context-parallel interleave size.", support=later("Tensor and pipeline parallel workers")
    )
    cp_kv_cache_interleave_size: int | None = flag(
        None,
        "How many consecutive tokens go to one context-parallel rank before the next; 1 = token i on rank i mod N.",
        support=later("Tensor and pipeline parallel workers"),
    )
    prefill_context_parallel_size: int = flag(
        1,
        "Ranks that divide the prompt computation of a sequence; multiplies the number of worker processes.",
        aliases=("-pcp",),
        support=later("Tensor and pipeline parallel workers"),
    )
    data_parallel_size: int = flag(
        1, "Independent copies of the engine.", aliases=("-dp",), support=later("Data-parallel engines")
    )
    data_parallel_rank: int | None = flag(
        None,
        "Rank of this process's single replica; giving it selects external load balancing.",
        aliases=("-dpn",),
        support=later("Data-parallel engines"),
    )
    data_parallel_start_rank: int | None = flag(
        None, "First DP rank hosted on this machine.", aliases=("-dpr",), support=later("Data-parallel engines")
    )
    data_parallel_size_local: int | None = flag(
        None, "How many replicas this machine runs.", aliases=("-dpl",), support=later("Data-parallel engines")
    )
    data_parallel_address: str | None = flag(
        None,
        "Address of the DP head node for handshakes and the coordination group.",
        aliases=("-dpa",),
        support=later("Data-parallel engines"),
    )
    data_parallel_rpc_port: int | None = flag(
        None, "Handshake port shared by all DP nodes.", aliases=("-dpp",), support=later("Data-parallel engines")
    )
    data_parallel_backend: Literal["mp", "ray"] = flag(
        "mp",
        "Who starts DP engines: local processes (mp) or Ray.",
        aliases=("-dpb",),
        support=later("Data-parallel engines"),
    )
    data_parallel_hybrid_lb: bool = flag(
        False,
        "Each node runs its own API servers balancing over local replicas; something outside balances over nodes.",
        aliases=("-dph",),
        support=later("Data-parallel engines"),
    )
    data_parallel_external_lb: bool = flag(
        False,
        "One API server per replica and an outside balancer that sees each one.",
        aliases=("-dpe",),
        support=later("Data-parallel engines"),
    )
    data_parallel_multi_port_external_lb: bool = flag(
        False,
        (
            "A supervisor starts one single-replica API server per local DP rank on consecutive ports and reports "
            "their joint health on its own port."
        ),
        aliases=("-dpm",),
        one_way=True,
        support=later("Data-parallel engines"),
    )
    enable_expert_parallel: bool = flag(
        False,
        "Distribute whole experts over ranks instead of slicing each expert.",
        aliases=("-ep",),
        support=later("Mixture-of-experts models"),
    )
    enable_batch_sharded_sampling: bool | None = flag(
        None, "Every TP rank samples only its part of the batch.", support=later("Tensor and pipeline parallel workers")
    )
    enable_ep_weight_filter: bool = flag(
        False, "Skip reading expert tensors owned by other ranks.", support=later("Mixture-of-experts models")
    )
    all2all_backend: All2allBackend = flag(
        "allgather_reducescatter",
        "Transport that sends tokens to their experts.",
        support=later("Mixture-of-experts models"),
    )
    enable_dbo: bool = flag(
        False,
        "Split a batch into two microbatches so expert communication overlaps with compute.",
        support=later("Mixture-of-experts models"),
    )
    ubatch_size: int = flag(
        0,
        "Number of microbatches when dual-batch overlap is off; > 1 enables microbatching.",
        support=later("Mixture-of-experts models"),
    )
    enable_elastic_ep: bool = flag(
        False, "Let the DP/EP group grow and shrink at run time.", support=later("Elastic expert-parallel groups")
    )
    elastic_ep_max_dp_size: int | None = flag(
        None, "Largest DP size the elastic group may reach.", support=later("Elastic expert-parallel groups")
    )
    dbo_decode_token_threshold: int = flag(
        32, "Decode-only batches with more tokens than this are split.", support=later("Mixture-of-experts models")
    )
    dp_sync_interval: int = flag(
        16,
        "Engine steps between the all-reduces by which DP ranks agree that all work is finished.",
        support=later("Data-parallel engines"),
    )
    dbo_prefill_token_threshold: int = flag(
        512,
        "Batches containing prefill with more tokens than this are split.",
        support=later("Mixture-of-experts models"),
    )
    disable_nccl_for_dp_synchronization: bool | None = flag(
        None,
        "Run the per-step DP token-count exchange on gloo rather than NCCL.",
        support=later("Data-parallel engines"),
    )
    enable_eplb: bool = flag(
        False, "Periodically re-places experts so load is even.", support=later("Mixture-of-experts models")
    )
    eplb_config: dict[str, Any] = flag(
        {},
        (
            "Keys: window_size 1000, step_interval 3000, num_redundant_experts 0, log_balancedness false, "
            "log_balancedness_interval 1, use_async true, policy default, communicator null, "
            "enable_migration_batching false."
        ),
        support=later("Mixture-of-experts models"),
    )
    expert_placement_strategy: Literal["linear", "round_robin"] = flag(
        "linear",
        "linear gives each rank a contiguous run of experts, round_robin deals them out in turn.",
        support=later("Mixture-of-experts models"),
    )
    max_parallel_loading_workers: int | None = flag(
        None,
        "Upper limit on workers loading weights at once.",
        nullable=True,
        support=later("Tensor and pipeline parallel workers"),
    )
    ray_workers_use_nsight: bool = flag(
        False, "Profile Ray workers with Nsight Systems.", support=later("Ray executors")
    )
    disable_custom_all_reduce: bool = flag(
        False, "Use NCCL instead of the hand-written all-reduce kernel.", support=gpu_only("Custom all-reduce kernels")
    )
    worker_cls: str = flag("auto", "Qualified name of the worker class.")
    worker_extension_cls: str = flag(
        "",
        "Class mixed into the worker so that collective_rpc can call its methods.",
    )
    enable_fault_tolerance: bool = flag(
        False,
        "Keep serving when a DP engine dies, by pausing and shrinking the group.",
        support=later("Data-parallel engines"),
    )
    fault_tolerance_config: dict[str, Any] = flag(
        {},
        "Key: engine_recovery_timeout_sec (120), the seconds an engine waits for recovery instructions.",
        support=later("Data-parallel engines"),
    )


@dataclass
class DeviceConfig:
    """Where the model runs."""

    device: Literal["auto", "cpu", "cuda"] = flag("auto", "Device type; auto takes a GPU when there is one.")
