"""Llama, Mistral and their many kin (SmolLM2, TinyLlama …): pre-norm decoder, rotary positions, gated MLP."""

import torch

from vllm_clone.attention import ForwardContext
from vllm_clone.layers.options import BuildOptions
from vllm_clone.layers.rotary import RotaryEmbedding
from vllm_clone.models.checkpoint import decoder_table
from vllm_clone.models.config import DecoderConfig, HFConfig, read, read_decoder, read_optional
from vllm_clone.models.decoder import DecoderForCausalLM, DecoderLayer, GatedMLP, SelfAttention, hidden_norm


class LlamaLayer(DecoderLayer):
    """Attention and MLP, each fed by a norm of the residual stream."""

    def __init__(self, config: DecoderConfig, layer: int, rope: RotaryEmbedding, options: BuildOptions) -> None:
        super().__init__(config, layer, rope, options)
        self.input_norm = hidden_norm(config, options)
        self.self_attn = SelfAttention(config, layer, rope, options)
        self.mlp_norm = hidden_norm(config, options)
        self.mlp = GatedMLP(config, options)

    def forward(
        self, positions_T: torch.Tensor, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        normed_TD = self.input_norm(residual_TD) if x_TD is None else self.input_norm.add(x_TD, residual_TD)
        x_TD = self.self_attn(positions_T, normed_TD, ctx)
        return self.mlp(self.mlp_norm.add(x_TD, residual_TD))


class LlamaForCausalLM(DecoderForCausalLM):
    layer_class = LlamaLayer
    weight_table = decoder_table({"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"})

    @staticmethod
    def read_config(hf: HFConfig) -> DecoderConfig:
        bias = read(hf, "attention_bias", bool, False)
        return read_decoder(hf, qkv_bias=bias, o_bias=bias, mlp_bias=read(hf, "mlp_bias", bool, False))


class MistralForCausalLM(LlamaForCausalLM):
    """Llama with, in its first version, a sliding window in every layer."""

    @staticmethod
    def read_config(hf: HFConfig) -> DecoderConfig:
        window = read_optional(hf, "sliding_window", int, 4096) or 0
        return read_decoder(hf, windows=(window,) * read(hf, "num_hidden_layers", int))
