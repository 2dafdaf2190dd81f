"""GPT-2: learned positions, layer norms, one matrix for q, k and v, a plain MLP; checkpoints store [in, out]."""

from dataclasses import dataclass

import torch
from torch import nn

from vllm_clone import kernels
from vllm_clone.attention import ForwardContext
from vllm_clone.errors import ModelLoadError
from vllm_clone.layers.activation import activation
from vllm_clone.layers.attention import Attention
from vllm_clone.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from vllm_clone.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm_clone.layers.norm import LayerNorm
from vllm_clone.layers.options import BuildOptions
from vllm_clone.models.base import CausalLM
from vllm_clone.models.checkpoint import To, WeightTable
from vllm_clone.models.config import HFConfig, read


@dataclass(frozen=True)
class GPT2Config:
    vocab_size: int
    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    num_positions: int
    activation: str
    norm_eps: float
    scale_weights: bool
    scale_by_layer: bool
    tied: bool

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    def scale(self, layer: int) -> float:
        """Factor on q·k in a layer."""
        scale = self.head_size**-0.5 if self.scale_weights else 1.0
        return scale / (layer + 1) if self.scale_by_layer else scale


def read_config(hf: HFConfig) -> GPT2Config:
    """GPT-2's settings in config.json. Raises ModelLoadError for what cannot be served."""
    if read(hf, "add_cross_attention", bool, False):
        raise ModelLoadError("config.json: add_cross_attention is set; only decoders without an encoder are served")
    hidden, heads = read(hf, "n_embd", int), read(hf, "n_head", int)
    if hidden % heads:
        raise ModelLoadError(f"config.json: n_embd ({hidden}) must be a multiple of n_head ({heads})")
    return GPT2Config(
        vocab_size=read(hf, "vocab_size", int),
        hidden_size=hidden,
        inner_size=read(hf, "n_inner", int, 4 * hidden),
        num_layers=read(hf, "n_layer", int),
        num_heads=heads,
        num_positions=read(hf, "n_positions", int, 1024),
        activation=read(hf, "activation_function", str, "gelu_new"),
        norm_eps=read(hf, "layer_norm_epsilon", float, 1e-5),
        scale_weights=read(hf, "scale_attn_weights", bool, True),
        scale_by_layer=read(hf, "scale_attn_by_inverse_layer_idx", bool, False),
        tied=read(hf, "tie_word_embeddings", bool, True),
    )


class GPT2Attention(nn.Module):
    def __init__(self, config: GPT2Config, layer: int, options: BuildOptions) -> None:
        super().__init__()
        hidden, heads = config.hidden_size, config.num_heads
        self.c_attn = QKVParallelLinear(hidden, config.head_size, heads, heads, bias=True, options=options)
        self.c_proj = RowParallelLinear(hidden, hidden, bias=True, options=options)
        self.attn = Attention(
            self.c_attn.num_heads,
            config.head_size,
            config.scale(layer),
            self.c_attn.num_kv_heads,
            layer_name=f"transformer.h.{layer}.attn.attn",
            options=options,
        )

    def forward(self, x_TD: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T, D] → [T, D]."""
        q, k, v = self.c_attn(x_TD).split(self.c_attn.sizes, dim=-1)
        return self.c_proj(self.attn(q, k, v, ctx))


class GPT2MLP(nn.Module):
    def __init__(self, config: GPT2Config, options: BuildOptions) -> None:
        super().__init__()
        self.c_fc = ColumnParallelLinear(config.hidden_size, config.inner_size, bias=True, options=options)
        self.c_proj = RowParallelLinear(config.inner_size, config.hidden_size, bias=True, options=options)
        self.activation = activation(config.activation)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        """[T, D] → [T, D]."""
        return self.c_proj(self.activation(self.c_fc(x_TD)))


class GPT2Layer(nn.Module):
    def __init__(self, config: GPT2Config, layer: int, options: BuildOptions) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config.hidden_size, config.norm_eps, options)
        self.attn = GPT2Attention(config, layer, options)
        self.ln_2 = LayerNorm(config.hidden_size, config.norm_eps, options)
        self.mlp = GPT2MLP(config, options)

    def forward(self, x_TD: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """[T, D] → [T, D], the residual stream in float32, in place."""
        kernels.add_(x_TD, self.attn(self.ln_1(x_TD), ctx))
        kernels.add_(x_TD, self.mlp(self.ln_2(x_TD)))
        return x_TD


class GPT2Model(nn.Module):
    """Embeddings of tokens and positions, layers and the last norm."""

    def __init__(self, config: GPT2Config, options: BuildOptions) -> None:
        super().__init__()
        self.wte = VocabParallelEmbedding(config.vocab_size, config.hidden_size, options)
        self.wpe = PositionEmbedding(config.num_positions, config.hidden_size, options)
        self.h = nn.ModuleList(GPT2Layer(config, i, options) for i in range(config.num_layers))
        self.ln_f = LayerNorm(config.hidden_size, config.norm_eps, options)

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        x_TD = self.wte(input_ids_T)
        kernels.add_(x_TD, self.wpe(positions_T))
        for layer in self.h:
            x_TD = layer(x_TD, ctx)
        return self.ln_f(x_TD)


class GPT2LMHeadModel(CausalLM):
    weight_table = WeightTable(
        {
            **{f"transformer.{x}": To(f"transformer.{x}") for x in ("wte", "wpe", "ln_f", "h.*.ln_1", "h.*.ln_2")},
            **{
                f"transformer.h.*.{x}": To(f"transformer.h.*.{x}", transpose=True)
                for x in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
            },
            "lm_head": To("lm_head"),
        },
        ignored=frozenset({"transformer.h.*.attn.bias"}),  # the causal mask of old checkpoints
        optional_prefix="transformer.",
    )

    def __init__(self, hf_config: HFConfig, options: BuildOptions) -> None:
        super().__init__(hf_config, options)
        config = read_config(hf_config)
        self.transformer = GPT2Model(config, options)
        self.build_head(self.transformer.wte, config.tied, options)

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self.transformer(input_ids_T, positions_T, ctx)
