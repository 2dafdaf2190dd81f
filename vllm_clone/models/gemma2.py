"""Gemma 2: alternating sliding and full attention, norms around both blocks, capped scores and logits."""

import torch
from torch import nn

from vllm_clone.attention import ForwardContext
from vllm_clone.errors import ModelLoadError
from vllm_clone.layers.embedding import VocabParallelEmbedding
from vllm_clone.layers.norm import RMSNorm
from vllm_clone.layers.options import BuildOptions
from vllm_clone.layers.rotary import RotaryEmbedding
from vllm_clone.models.base import CausalLM
from vllm_clone.models.blocks import GatedMLP, SelfAttention, shared_ropes
from vllm_clone.models.checkpoint import decoder_table
from vllm_clone.models.config import (
    DecoderConfig,
    HFConfig,
    layer_types,
    read,
    read_decoder,
    read_optional,
    windows_of,
)

LAYER_NORMS = {
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "attn_out_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_out_norm",
}


class GemmaLayer(nn.Module):
    """Attention and MLP with a norm before and after each."""

    def __init__(self, config: DecoderConfig, layer: int, rope: RotaryEmbedding, options: BuildOptions) -> None:
        super().__init__()
        for name in LAYER_NORMS.values():
            self.add_module(name, _norm(config, options))
        self.self_attn = SelfAttention(config, layer, rope, options)
        self.mlp = GatedMLP(config, options)

    input_norm: RMSNorm
    attn_out_norm: RMSNorm
    mlp_norm: RMSNorm
    mlp_out_norm: RMSNorm

    def forward(
        self, positions_T: torch.Tensor, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """Return the MLP's normalised output, not yet added to ``residual_TD``; ``x_TD`` is the layer before's."""
        normed_TD = self.input_norm(residual_TD) if x_TD is None else self.input_norm.add(x_TD, residual_TD)
        x_TD = self.attn_out_norm(self.self_attn(positions_T, normed_TD, ctx))
        return self.mlp_out_norm(self.mlp(self.mlp_norm.add(x_TD, residual_TD)))


def _norm(config: DecoderConfig, options: BuildOptions) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.norm_eps, options, config.norm_offset)


class GemmaModel(nn.Module):
    """Scaled embedding, layers and the last norm."""

    def __init__(self, config: DecoderConfig, options: BuildOptions) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, options)
        # The scale is rounded to the model's dtype, as it was in training.
        self.embed_scale = torch.tensor(config.hidden_size**0.5, dtype=options.dtype).item()
        ropes = shared_ropes(config.ropes, options)
        self.layers = nn.ModuleList(GemmaLayer(config, i, rope, options) for i, rope in enumerate(ropes))
        self.norm = _norm(config, options)

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        residual_TD, x_TD = self.embed_tokens(input_ids_T) * self.embed_scale, None
        for layer in self.layers:
            x_TD = layer(positions_T, x_TD, residual_TD, ctx)
        return self.norm(residual_TD) if x_TD is None else self.norm.add(x_TD, residual_TD)


class Gemma2ForCausalLM(CausalLM):
    weight_table = decoder_table(LAYER_NORMS)

    def __init__(self, hf_config: HFConfig, options: BuildOptions) -> None:
        super().__init__(hf_config, options)
        config = self.read_config(hf_config)
        self.model = GemmaModel(config, options)
        self.tied = config.tied
        self.logit_cap = config.logit_cap
        self.lm_head = (
            self.model.embed_tokens
            if config.tied
            else VocabParallelEmbedding(config.vocab_size, config.hidden_size, options)
        )

    @staticmethod
    def read_config(hf: HFConfig) -> DecoderConfig:
        """Gemma 2's settings in config.json; Gemma 3 overrides this."""
        layers = read(hf, "num_hidden_layers", int)
        kinds = layer_types(hf, [("sliding_attention", "full_attention")[i % 2] for i in range(layers)])
        return read_gemma(
            hf,
            windows=windows_of(kinds, read_optional(hf, "sliding_window", int, 4096)),
            score_cap=read_optional(hf, "attn_logit_softcapping", float, 50.0) or 0.0,
            logit_cap=read_optional(hf, "final_logit_softcapping", float, 30.0) or 0.0,
        )

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self.model(input_ids_T, positions_T, ctx)


def read_gemma(hf: HFConfig, **family: object) -> DecoderConfig:
    """What Gemma 2 and 3 have in common; ``family`` gives the rest.

    Raises:
        ModelLoadError: also when attention is bidirectional, which is no text generation.
    """
    if read(hf, "use_bidirectional_attention", bool, False):
        raise ModelLoadError("config.json: use_bidirectional_attention is set; only causal attention generates text")
    bias = read(hf, "attention_bias", bool, False)
    return read_decoder(
        hf,
        head_size=256,
        activation=read(hf, "hidden_activation", str, "gelu_pytorch_tanh"),
        tied=read(hf, "tie_word_embeddings", bool, True),
        qkv_bias=bias,
        o_bias=bias,
        norm_offset=1.0,
        scale=read(hf, "query_pre_attn_scalar", float, 256.0) ** -0.5,
        **family,
    )
