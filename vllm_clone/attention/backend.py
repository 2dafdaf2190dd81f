"""The interface every attention backend implements."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

from vllm_clone.attention.metadata import AttentionMetadata
from vllm_clone.config.kv_cache import KVCacheSpec
from vllm_clone.kernels import Rotary


class AttentionBackend(ABC):
    """Stores keys and values in the paged cache and attends over it. Stateless; layers share one instance."""

    name: ClassVar[str]
    """As given to ``--attention-backend``."""

    @staticmethod
    @abstractmethod
    def supports(platform: str, spec: KVCacheSpec, dtype: torch.dtype) -> str | None:
        """None when the backend can serve layers of ``spec`` with queries of ``dtype``, else the reason in words."""

    @staticmethod
    @abstractmethod
    def kv_cache_shape(num_blocks: int, spec: KVCacheSpec) -> tuple[int, ...]:
        """Shape of one layer's cache tensor. The block is the outermost axis, so a block is one contiguous page."""

    def plan(self, step: AttentionMetadata) -> AttentionMetadata:
        """Turn a step into what ``forward`` wants, once per step and group; most backends take it as it is."""
        return step

    @abstractmethod
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
        """Store the step's keys and values, then write causal attention over each row's sequence to ``out_THD``.

        Args:
            q_THD: queries, H heads of size D.
            k_TKD: keys, K heads; H is a multiple of K and query head h reads key head h // (H / K).
            v_TKD: values, laid out as the keys.
            kv_cache: the layer's cache, of ``kv_cache_shape``.
            metadata: what ``plan`` returned.
            out_THD: receives the result in q's dtype; rows beyond ``num_actual_tokens`` are left alone.
            rotary: how queries and keys are turned on the way, if at all; the arguments stay as they are.
            scale: factor on q·k.
            sliding_window: a token sees this many latest tokens, itself included; 0 sees all.
            softcap: scores become softcap × tanh(score / softcap) before the softmax; 0 leaves them.
        """
