"""Attention on the CPU through the kernels of this package."""

import torch

from vllm_clone import kernels
from vllm_clone.attention.backend import AttentionBackend
from vllm_clone.attention.metadata import AttentionMetadata
from vllm_clone.config.kv_cache import DTYPE_BYTES, KVCacheSpec


class CPUAttentionBackend(AttentionBackend):
    """Cache layout ``[blocks, 2, kv heads, block size, head size]``: keys, then values, of one block together."""

    name = "CPU_ATTN"

    @staticmethod
    def supports(platform: str, spec: KVCacheSpec, dtype: torch.dtype) -> str | None:
        if platform != "cpu":
            return f"it runs on the CPU, not on {platform}"
        name = str(dtype).removeprefix("torch.")
        if name not in DTYPE_BYTES:
            return f"it computes in {', '.join(DTYPE_BYTES)}, not in {name}"
        if spec.dtype != name:
            return f"it stores keys and values in the model's dtype ({name}), not in {spec.dtype}"
        return None

    @staticmethod
    def kv_cache_shape(num_blocks: int, spec: KVCacheSpec) -> tuple[int, ...]:
        return (num_blocks, 2, spec.num_kv_heads, spec.block_size, spec.head_size)

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        out_THD: torch.Tensor,
        *,
        scale: float,
        sliding_window: int = 0,
        softcap: float = 0.0,
    ) -> None:
        n = metadata.num_actual_tokens
        kernels.reshape_and_cache(k_TKD[:n], v_TKD[:n], kv_cache, metadata.slot_mapping_T[:n])
        kernels.paged_attention(
            q_THD[:n],
            kv_cache,
            metadata.block_table_RB,
            metadata.query_start_loc_R1,
            metadata.seq_lens_R,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            out_THD=out_THD[:n],
        )
