"""What decoder families share: rotary self-attention, the gated MLP, and the model around a family's layers."""

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import nn

from vllm_clone import kernels
from vllm_clone.attention import ForwardContext
from vllm_clone.layers.activation import gated_activation
from vllm_clone.layers.attention import Attention
from vllm_clone.layers.embedding import VocabParallelEmbedding
from vllm_clone.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm_clone.layers.norm import RMSNorm
from vllm_clone.layers.options import BuildOptions
from vllm_clone.layers.rotary import RopeConfig, RotaryEmbedding
from vllm_clone.models.base import CausalLM
from vllm_clone.models.config import DecoderConfig, HFConfig


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
            self.q_norm.heads_(q)
            self.k_norm.heads_(k)
        return self.o_proj(self.attn(q, k, v, ctx, self.rope.at(positions_T)))


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
        return self.down_proj(self.gate_up_proj.gated(x_TD, self.activation))


def hidden_norm(config: DecoderConfig, options: BuildOptions) -> RMSNorm:
    """A norm of the residual stream's width, in the family's flavour."""
    return RMSNorm(config.hidden_size, config.norm_eps, options, config.norm_offset)


class DecoderLayer(nn.Module):
    """One layer of a family."""

    @abstractmethod
    def __init__(self, config: DecoderConfig, layer: int, rope: RotaryEmbedding, options: BuildOptions) -> None:
        super().__init__()

    @abstractmethod
    def forward(
        self, positions_T: torch.Tensor, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """The layer's output, not yet added to the residual stream.

        Args:
            positions_T: int64.
            x_TD: the output of the layer before, which this one adds to ``residual_TD`` in place; None in the first
                layer, whose residual stream is the embedding.
            residual_TD: the residual stream, float32: bfloat16 would lose what later layers add.
            ctx: attention metadata.
        """


class DecoderModel(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: DecoderConfig, options: BuildOptions, layer_class: type[DecoderLayer]) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, options)
        # Rounded to the model's dtype, as it was in training.
        self.embed_scale = torch.tensor(config.embed_scale, dtype=options.dtype).item()
        ropes = shared_ropes(config.ropes, options)
        self.layers = nn.ModuleList(layer_class(config, i, rope, options) for i, rope in enumerate(ropes))
        self.norm = hidden_norm(config, options)

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T] → [T, D]."""
        residual_TD, x_TD = self.embed_tokens(input_ids_T), None
        if self.embed_scale != 1.0:
            kernels.scale_(residual_TD, self.embed_scale)
        for layer in self.layers:
            x_TD = layer(positions_T, x_TD, residual_TD, ctx)
        return self.norm(residual_TD) if x_TD is None else self.norm.add(x_TD, residual_TD)


class DecoderForCausalLM(CausalLM):
    """A model made of one family's layers: the family gives the layer, the config reader and the table."""

    layer_class: ClassVar[type[DecoderLayer]]

    def __init__(self, hf_config: HFConfig, options: BuildOptions) -> None:
        super().__init__(hf_config, options)
        config = self.read_config(hf_config)
        self.model = DecoderModel(config, options, self.layer_class)
        self.logit_cap = config.logit_cap
        self.build_head(self.model.embed_tokens, config.tied, options)

    @staticmethod
    @abstractmethod
    def read_config(hf: HFConfig) -> DecoderConfig:
        """The family's settings in config.json. Raises ModelLoadError for what cannot be served."""

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self.model(input_ids_T, positions_T, ctx)
