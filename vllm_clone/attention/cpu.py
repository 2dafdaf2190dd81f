"""Attention on the CPU through the kernels of this package."""

import torch

from vllm_clone import kernels
from vllm_clone.attention.backend import AttentionBackend
from vllm_clone.attention.metadata import AttentionMetadata
from vllm_clone.config.kv_cache import KV_DTYPES, KVCacheSpec
from vllm_clone.kernels import Rotary

_COMPUTES_IN = (torch.float32, torch.bfloat16, torch.float16)
_MAX_HEAD_SIZE = 512


class CPUAttentionBackend(AttentionBackend):
    """Pages hold the keys of every head, then the values; csrc/cpu/kv_cache.h has the order within a head."""

    name = "CPU_ATTN"

    @staticmethod
    def supports(platform: str, spec: KVCacheSpec, dtype: torch.dtype) -> str | None:
        if platform != "cpu":
            return f"it runs on the CPU, not on {platform}"
        if dtype not in _COMPUTES_IN:
            return f"it computes in {', '.join(map(str, _COMPUTES_IN))}, not in {dtype}"
        if spec.dtype not in KV_DTYPES:
            return f"it stores {', '.join(KV_DTYPES)}, not {spec.dtype}"
        if spec.head_size % 2 or spec.head_size > _MAX_HEAD_SIZE:
            return f"heads must have an even size up to {_MAX_HEAD_SIZE}, not {spec.head_size}"
        return None

    @staticmethod
    def kv_cache_shape(num_blocks: int, spec: KVCacheSpec) -> tuple[int, ...]:
        width = spec.head_size + KV_DTYPES[spec.dtype].scale_bytes  # scales go with elements of one byte
        return (num_blocks, 2, spec.num_kv_heads, spec.block_size, width)

    def forward(
        self,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        out_THD: torch.Tensor,
        *,
        rotary: Rotary | None = None,
        scale: float,
        sliding_window: int = 0,
        softcap: float = 0.0,
    ) -> None:
        n = metadata.num_actual_tokens
        kernels.fused_attention(
            q_THD[:n],
            k_TKD[:n],
            v_TKD[:n],
            kv_cache,
            metadata.slot_mapping_T[:n],
            metadata.block_table_RB,
            metadata.query_start_loc_R1,
            metadata.seq_lens_R,
            rotary=rotary,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            out_THD=out_THD[:n],
        )
