"""Gemma 2: alternating sliding and full attention, norms around both blocks, capped scores and logits."""

import torch

from vllm_clone.attention import ForwardContext
from vllm_clone.errors import ModelLoadError
from vllm_clone.layers.options import BuildOptions
from vllm_clone.layers.rotary import RotaryEmbedding
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
from vllm_clone.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention, hidden_norm


class GemmaLayer(DecoderLayer):
    """Attention and MLP with a norm before and after each."""

    def __init__(self, config: DecoderConfig, layer: int, rope: RotaryEmbedding, options: BuildOptions) -> None:
        super().__init__(config, layer, rope, options)
        self.input_norm = hidden_norm(config, options)
        self.self_attn = SelfAttention(config, layer, rope, options)
        self.attn_out_norm = hidden_norm(config, options)
        self.mlp_norm = hidden_norm(config, options)
        self.mlp = GatedMLP(config, options)
        self.mlp_out_norm = hidden_norm(config, options)

    def forward(
        self, positions_T: torch.Tensor, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        normed_TD = self.input_norm(residual_TD) if x_TD is None else self.input_norm.add(x_TD, residual_TD)
        x_TD = self.attn_out_norm(self.self_attn(positions_T, normed_TD, ctx))
        return self.mlp_out_norm(self.mlp(self.mlp_norm.add(x_TD, residual_TD)))


class Gemma2ForCausalLM(DecoderForCausalLM):
    layer_class = GemmaLayer
    weight_table = decoder_table(
        {
            "input_layernorm": "input_norm",
            "post_attention_layernorm": "attn_out_norm",
            "pre_feedforward_layernorm": "mlp_norm",
            "post_feedforward_layernorm": "mlp_out_norm",
        }
    )

    @staticmethod
    def read_config(hf: HFConfig) -> DecoderConfig:
        layers = read(hf, "num_hidden_layers", int)
        kinds = layer_types(hf, [("sliding_attention", "full_attention")[i % 2] for i in range(layers)])
        return read_gemma(
            hf,
            windows=windows_of(kinds, read_optional(hf, "sliding_window", int, 4096)),
            score_cap=read_optional(hf, "attn_logit_softcapping", float, 50.0) or 0.0,
            logit_cap=read_optional(hf, "final_logit_softcapping", float, 30.0) or 0.0,
        )


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
        embed_scale=read(hf, "hidden_size", int) ** 0.5,
        scale=read(hf, "query_pre_attn_scalar", float, 256.0) ** -0.5,
        **family,
    )
