"""What is kept between steps: the KV cache, recurrent states, weights in host memory."""

from dataclasses import dataclass
from typing import Annotated, Literal

from vllm_clone.config.flags import (
    HumanInt,
    flag,
    lower,
    resolved,
)
from vllm_clone.config.kv_cache import KV_DTYPES, KV_NOT_SERVED
from vllm_clone.config.support import gpu_only, later, not_here

BlockSize = Literal[1, 8, 16, 32, 64, 128, 256]
KVCacheDtype = Literal[
    "auto", "bfloat16", "float16", "float32", "int8", "fp8", "fp8_ds_mla", "fp8_e4m3", "fp8_e5m2", "fp8_inc",
    "fp8_per_token_head", "int4_per_token_head", "int8_per_token_head", "nvfp4", "nvfp4_4over6", "nvfp4_ds_mla",
    "turboquant_3bit_nc", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_k8v4", "ultraquant_4bit",
]  # fmt: skip


@dataclass
class CacheConfig:
    """The paged KV cache."""

    block_size: BlockSize | None = flag(
        None, "Tokens per KV block; 32 when not given, which CPU kernels read as they lie."
    )
    gpu_memory_utilization: float = flag(
        0.92,
        "Fraction of the device's memory to use; a CPU without this flag takes a part of what is free.",
        aliases=("--device-memory-utilization",),
    )
    kv_cache_memory_bytes: HumanInt | None = flag(
        None, "Size of the KV cache in bytes; overrides every estimate.", nullable=True
    )
    kv_cache_dtype: KVCacheDtype = flag(
        "auto",
        "Data type of the KV cache: auto is the model's, fp8 is fp8_e4m3, int8 is int8_per_token_head.",
        support=not_here("the kernels keep no such cache", "use another type"),
        working=("auto", "int8", "fp8", *KV_DTYPES),
        reasons=KV_NOT_SERVED,
    )
    num_gpu_blocks_override: int | None = flag(
        None, "Number of KV blocks, whatever the memory; for tests.", nullable=True
    )
    enable_prefix_caching: bool | None = flag(None, "Reuse KV blocks of equal prompt prefixes; on by default.")
    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] = flag(
        "sha256", "Hash that identifies a block's prefix."
    )
    prefix_cache_retention_interval: int | None = flag(
        0,
        (
            "Spacing in tokens of extra sliding-window/Mamba checkpoints kept for prefix reuse; 0 keeps only "
            "meaningful points, None keeps all."
        ),
        nullable=True,
        support=later("Prefix checkpoints of sliding-window layers"),
    )
    kv_cache_dtype_skip_layers: list[str] = flag(
        [],
        "Layers whose KV stays unquantized: layer indices or an attention type name such as sliding_window.",
        support=later("Per-layer KV cache types"),
    )
    kv_sharing_fast_prefill: bool = flag(
        False,
        "For models whose later layers share KV (YOCO style), skips prompt tokens in those layers.",
        support=later("Models whose layers share their KV cache"),
    )
    swa_bounded_replay: bool = flag(
        True,
        (
            "For models that support it, keeps sliding-window KV out of the prefix cache and recomputes the last "
            "window after a hit."
        ),
        support=later("Models with bounded replay"),
    )
    mamba_cache_dtype: Literal["auto", "bfloat16", "float16", "float32"] = flag(
        "auto", "Storage type of Mamba convolution and SSM state.", support=later("Mamba models")
    )
    mamba_ssm_cache_dtype: Literal["auto", "bfloat16", "float16", "float32"] = flag(
        "auto", "Storage type of the SSM state only.", support=later("Mamba models")
    )
    mamba_block_size: int | None = flag(
        None, "Tokens per Mamba state block.", nullable=True, support=later("Mamba models")
    )
    prefix_match_unit: int | None = flag(
        None,
        "Finest token step at which a prefix hit may end; may be smaller than the physical block.",
        nullable=True,
        support=later("Prefix matches finer than a block"),
    )
    mamba_cache_mode: Literal["none", "align", "all"] = flag(
        "none",
        "Which Mamba states are cached: none, align (at block-aligned step ends) or all (every block).",
        support=later("Mamba models"),
    )
    enable_mamba_shared_prefix_checkpoint: bool = flag(
        False, "Also stores a Mamba checkpoint where sequences were seen to branch.", support=later("Mamba models")
    )
    replayssm_buffer_len: int = flag(
        16, "Number of recent SSM inputs buffered by the ReplaySSM decode kernel.", support=later("Mamba models")
    )
    use_replayssm: bool = flag(
        False,
        "Buffer recent inputs and rewrites the SSM state only when the buffer is flushed.",
        support=later("Mamba models"),
    )
    kv_offloading_size: float | None = flag(
        None,
        (
            "GiB of host memory (summed over TP ranks) used as a second tier for KV blocks; setting it turns "
            "offloading on."
        ),
        nullable=True,
        support=later("KV cache offloads"),
    )
    kv_offloading_backend: Literal["lmcache", "native"] = flag(
        "native", "Implementation of that tier.", support=later("KV cache offloads")
    )
    swap_space: float = flag(
        4.0,
        "GiB of host memory for swapped-out KV blocks, as older releases had it.",
        support=not_here("preempted requests are computed again, never swapped out"),
    )
    calculate_kv_scales: bool = flag(
        False,
        "Compute FP8 key and value scales on first use instead of reading them from the checkpoint.",
        support=gpu_only("FP8 caches with computed scales"),
    )

    memory_share_given: bool = resolved(False)
    """Whether gpu_memory_utilization was given and so sizes the cache on a CPU too."""


@dataclass
class MambaConfig:
    """State-space layers."""

    mamba_backend: Annotated[Literal["triton", "flashinfer", "cpu"], lower] = flag(
        "triton", "Kernel for the selective state update of Mamba layers.", support=later("Mamba models")
    )
    mamba_ssu_algorithm: Literal["auto", "horizontal", "simple", "vertical"] | None = flag(
        None, "Variant of the FlashInfer state-update kernel.", nullable=True, support=later("Mamba models")
    )
    enable_mamba_cache_stochastic_rounding: bool = flag(
        False,
        "Round randomly when storing SSM state as float16, so long sequences do not drift.",
        support=later("Mamba models"),
    )
    mamba_cache_philox_rounds: int = flag(
        0, "Philox rounds used for that rounding noise; 0 takes the kernel default.", support=later("Mamba models")
    )


@dataclass
class OffloadConfig:
    """Weights that stay in host memory."""

    offload_backend: Literal["auto", "prefetch", "uva"] = flag(
        "auto", "Mechanism for keeping part of the weights in host memory.", support=gpu_only("Weights in host memory")
    )
    cpu_offload_gb: float = flag(
        0.0,
        "GiB of weights per GPU left in pinned host memory and read in place.",
        support=gpu_only("Weights in host memory"),
    )
    cpu_offload_params: list[str] = flag(
        [],
        "Whole dotted name segments choosing which parameters the in-place mechanism may offload.",
        support=gpu_only("Weights in host memory"),
    )
    offload_group_size: int = flag(
        0,
        "Size of the layer groups for prefetched offloading; the last layers of each group are offloaded.",
        support=gpu_only("Weights in host memory"),
    )
    offload_num_in_group: int = flag(1, "Layers offloaded per group.", support=gpu_only("Weights in host memory"))
    offload_prefetch_step: int = flag(
        1, "How many layers ahead copies are started.", support=gpu_only("Weights in host memory")
    )
    offload_params: list[str] = flag(
        [],
        "Name segments choosing which parameters of an offloaded layer move.",
        support=gpu_only("Weights in host memory"),
    )
