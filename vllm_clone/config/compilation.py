"""How the forward pass is run: recorded, compiled, with which kernels."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from vllm_clone.config.flags import (
    compilation_mode,
    flag,
    json_key,
    kernel_name,
    upper,
)
from vllm_clone.config.support import gpu_only, later, not_here

MoeBackend = Literal[
    "aiter",
    "aiter_mega_moe",
    "aiter_triton_mxfp4_bf16",
    "auto",
    "b12x",
    "batched_triton",
    "cutlass",
    "deep_gemm",
    "deep_gemm_mega_moe",
    "emulation",
    "flashinfer_b12x",
    "flashinfer_cutedsl",
    "flashinfer_cutlass",
    "flashinfer_moe_ep_cutedsl",
    "flashinfer_moe_ep_mega_deep_gemm",
    "flashinfer_trtllm",
    "flydsl",
    "hpc",
    "humming",
    "marlin",
    "rdna3",
    "triton",
    "triton_unfused",
]
LinearBackend = Literal[
    "aiter",
    "auto",
    "b12x",
    "conch",
    "cutlass",
    "deep_gemm",
    "emulation",
    "exllama",
    "fbgemm",
    "flashinfer_b12x",
    "flashinfer_cudnn",
    "flashinfer_cutedsl",
    "flashinfer_cutlass",
    "flashinfer_trtllm",
    "humming",
    "machete",
    "marlin",
    "torch",
    "triton",
    "xpu",
    "xpu_woq",
]
SparseIndexerTopkBackend = Literal[
    "aiter", "auto", "cooperative", "deep_select", "flashinfer", "per_row", "persistent", "torch"
]
OptimizationLevel = Literal["O0", "O1", "O2", "O3"]
CompilationMode = Literal[0, 1, 2, 3]
CudagraphMode = Literal["NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"]


@dataclass
class CompilationConfig:
    """How the forward pass is run."""

    mode: Annotated[CompilationMode, compilation_mode] | None = json_key(
        None,
        "0: the model's own code; 1 to 3: torch.compile.",
        support=later("Compiled models", "use mode 0"),
        working=(0,),
    )
    cudagraph_mode: Annotated[CudagraphMode, upper] | None = json_key(
        None,
        "NONE: every step through Python. FULL: replay a recording. FULL_DECODE_ONLY: replay steps without prompts.",
        support=gpu_only("Piecewise graphs", "use NONE, FULL or FULL_DECODE_ONLY"),
        working=("NONE", "FULL", "FULL_DECODE_ONLY"),
    )

    cudagraph_capture_sizes: list[int] | None = flag(
        None,
        "Step sizes in tokens; steps up to the largest are replayed from the recording, others run through Python.",
    )
    max_cudagraph_capture_size: int | None = flag(
        None, "Largest step, in tokens, that is replayed from the recording; larger steps run through Python."
    )


@dataclass
class KernelConfig:
    """Which kernels do the work."""

    ir_op_priority: dict[str, Any] = flag(
        {},
        (
            "JSON from op (rms_norm, fused_add_rms_norm, gelu_and_mul_sparse) to a list or comma-separated string "
            "of implementations in order of preference."
        ),
        support=not_here("each platform has one implementation of every operation"),
    )
    enable_flashinfer_autotune: bool | None = flag(
        None, "Tune FlashInfer kernels during warm-up.", support=gpu_only("FlashInfer kernels")
    )
    moe_backend: Annotated[MoeBackend, kernel_name] = flag(
        "auto",
        "Kernel for expert computation; hyphens and case are normalized.",
        support=gpu_only("Choices between kernels"),
    )
    linear_backend: Annotated[LinearBackend, kernel_name] = flag(
        "auto",
        "Kernel for linear layers; layers without such a kernel choose automatically.",
        support=gpu_only("Choices between kernels"),
    )
    sparse_indexer_topk_backend: Annotated[SparseIndexerTopkBackend, kernel_name] = flag(
        "auto", "Top-k kernel of the sparse-attention indexer.", support=gpu_only("Choices between kernels")
    )


@dataclass
class AttentionConfig:
    """Attention."""

    attention_backend: Annotated[str, upper] | None = flag(
        None,
        "Attention kernels of all layers; auto takes the platform's.",
        nullable=True,
        support=gpu_only("Attention backends other than CPU_ATTN"),
        working=("auto", "AUTO", "CPU_ATTN", "TORCH_SDPA"),
        key="backend",
    )
