"""Blocks that several families share: rotary self-attention and the gated MLP."""

import torch
from torch import nn

from vllm_clone.attention import ForwardContext
from vllm_clone.layers.activation import gated_activation
from vllm_clone.layers.attention import Attention
from vllm_clone.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm_clone.layers.norm import RMSNorm
from vllm_clone.layers.options import BuildOptions
from vllm_clone.layers.rotary import RopeConfig, RotaryEmbedding
from vllm_clone.models.config import DecoderConfig


def shared_ropes(configs: tuple[RopeConfig, ...], options: BuildOptions) -> list[RotaryEmbedding]:
    """One rotary embedding per layer; equal settings share one object and its table."""
    built: list[RotaryEmbedding] = []
    for config in configs:
        known = next((rope for rope in built if rope.rope == config), None)
        built.append(known or RotaryEmbedding(config, options.max_positions, options.device))
    return built


class SelfAttention(nn.Module):
    """Grouped-query attention with rotary embeddings and, in some families, normalised queries and keys."""

    def __init__(self, config: DecoderConfig, layer: int, rope: RotaryEmbedding, options: BuildOptions) -> None:
        super().__init__()
        size = config.head_size
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, size, config.num_heads, config.num_kv_heads, bias=config.qkv_bias, options=options
        )
        self.o_proj = RowParallelLinear(
            config.num_heads * size, config.hidden_size, bias=config.o_bias, options=options
        )
        self.q_norm, self.k_norm = (
            RMSNorm(size, config.norm_eps, options, config.norm_offset) if config.qk_norm else None for _ in "qk"
        )
        self.rope = rope
        self.attn = Attention(
            self.qkv_proj.num_heads,
            size,
            config.scale,
            self.qkv_proj.num_kv_heads,
            layer_name=f"model.layers.{layer}.self_attn.attn",
            options=options,
            sliding_window=config.windows[layer],
            softcap=config.score_cap,
        )

    def forward(self, positions_T: torch.Tensor, x_TD: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T, D] → [T, D]."""
        q, k, v = self.qkv_proj(x_TD).split(self.qkv_proj.sizes, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.heads(q), self.k_norm.heads(k)
        self.rope(positions_T, q, k)
        return self.o_proj(self.attn(q, k, v, ctx))


class GatedMLP(nn.Module):
    """down(activation(gate(x)) × up(x))."""

    def __init__(self, config: DecoderConfig, options: BuildOptions) -> None:
        super().__init__()
        inner, bias = config.intermediate_size, config.mlp_bias
        self.gate_up_proj = MergedColumnParallelLinear(
            config.hidden_size, {"gate": inner, "up": inner}, bias=bias, options=options
        )
        self.down_proj = RowParallelLinear(inner, config.hidden_size, bias=bias, options=options)
        self.activation = gated_activation(config.activation)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] → [T, D]."""
        return self.down_proj(self.activation(self.gate_up_proj(x_TD)))
