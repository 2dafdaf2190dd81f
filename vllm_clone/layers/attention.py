"""The layer that owns a KV cache and attends over it."""

import torch
from torch import nn

from vllm_clone import kernels
from vllm_clone.attention import ForwardContext, get_attention_backend
from vllm_clone.config.kv_cache import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from vllm_clone.errors import ConfigError
from vllm_clone.layers.options import BuildOptions


class Attention(nn.Module):
    """Causal attention with keys and values in the paged cache. Head counts are this rank's.

    Args:
        num_heads: query heads.
        head_size: elements per head.
        scale: factor on q·k.
        num_kv_heads: key and value heads; divides ``num_heads``.
        sliding_window: a token sees this many latest tokens, itself included; 0 sees all.
        softcap: cap of the scores, 0 for none.
        layer_name: unique in the model; names the layer's cache and its metadata.
        options: dtype and device.
    """

    kv_cache: torch.Tensor
    """Bound by the model runner before the first forward; shape as the backend's ``kv_cache_shape``."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        *,
        layer_name: str,
        options: BuildOptions,
        sliding_window: int = 0,
        softcap: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.scale = scale
        self.sliding_window = sliding_window
        self.softcap = softcap
        self.layer_name = layer_name
        self.dtype = options.dtype
        self.platform = options.device.type
        own_dtype = str(options.dtype).removeprefix("torch.")
        self.backend = get_attention_backend(self.platform, self._spec(16, own_dtype), options.dtype)

    def _spec(self, block_size: int, dtype: str) -> KVCacheSpec:
        if self.sliding_window:
            return SlidingWindowSpec(block_size, self.num_kv_heads, self.head_size, dtype, self.sliding_window)
        return FullAttentionSpec(block_size, self.num_kv_heads, self.head_size, dtype)

    def kv_cache_spec(self, block_size: int, dtype: str) -> KVCacheSpec:
        """What the layer stores per block. ``dtype`` is a key of KV_DTYPES.

        Raises:
            ConfigError: the layer's backend cannot keep such a cache.
        """
        spec = self._spec(block_size, dtype)
        reason = self.backend.supports(self.platform, spec, self.dtype)
        if reason is not None:
            raise ConfigError(f"attention backend {self.backend.name} cannot keep this KV cache: {reason}")
        return spec

    def forward(
        self,
        q_T_HD: torch.Tensor,
        k_T_KD: torch.Tensor,
        v_T_KD: torch.Tensor,
        ctx: ForwardContext,
        rotary: kernels.Rotary | None = None,
    ) -> torch.Tensor:
        """Queries [T, H·D], keys and values [T, K·D] → [T, H·D], contiguous. Queries and keys are turned if asked."""
        num_tokens = q_T_HD.shape[0]
        out_THD = kernels.empty((num_tokens, self.num_heads, self.head_size), q_T_HD.dtype)
        self.backend.forward(
            q_T_HD.view(num_tokens, self.num_heads, self.head_size),
            k_T_KD.view(num_tokens, self.num_kv_heads, self.head_size),
            v_T_KD.view(num_tokens, self.num_kv_heads, self.head_size),
            self.kv_cache,
            ctx.metadata[self.layer_name],
            out_THD,
            rotary=rotary,
            scale=self.scale,
            sliding_window=self.sliding_window,
            softcap=self.softcap,
        )
        return out_THD.view(num_tokens, -1)
