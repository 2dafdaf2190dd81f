"""Llama, Mistral and their many kin (SmolLM2, TinyLlama …): pre-norm decoder, rotary positions, gated MLP."""

import torch
from torch import nn

from vllm_clone.attention import ForwardContext
from vllm_clone.layers.embedding import VocabParallelEmbedding
from vllm_clone.layers.norm import RMSNorm
from vllm_clone.layers.options import BuildOptions
from vllm_clone.layers.rotary import RotaryEmbedding
from vllm_clone.models.base import CausalLM
from vllm_clone.models.blocks import GatedMLP, SelfAttention, shared_ropes
from vllm_clone.models.checkpoint import decoder_table
from vllm_clone.models.config import DecoderConfig, HFConfig, read, read_decoder, read_optional

LAYER_NORMS = {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"}


class LlamaLayer(nn.Module):
    """Attention and MLP, each fed by a norm of the residual stream."""

    def __init__(self, config: DecoderConfig, layer: int, rope: RotaryEmbedding, options: BuildOptions) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config.hidden_size, config.norm_eps, options)
        self.self_attn = SelfAttention(config, layer, rope, options)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, options)
        self.mlp = GatedMLP(config, options)

    def forward(
        self, positions_T: torch.Tensor, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, ctx: ForwardContext
    ) -> torch.Tensor:
        """Return the MLP's output, not yet added to ``residual_TD``; ``x_TD`` is the layer before's, likewise."""
        normed_TD = self.input_norm(residual_TD) if x_TD is None else self.input_norm.add(x_TD, residual_TD)
        x_TD = self.self_attn(positions_T, normed_TD, ctx)
        return self.mlp(self.mlp_norm.add(x_TD, residual_TD))


class LlamaModel(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: DecoderConfig, options: BuildOptions) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, options)
        ropes = shared_ropes(config.ropes, options)
        self.layers = nn.ModuleList(LlamaLayer(config, i, rope, options) for i, rope in enumerate(ropes))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, options)

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        residual_TD, x_TD = self.embed_tokens(input_ids_T), None
        for layer in self.layers:
            x_TD = layer(positions_T, x_TD, residual_TD, ctx)
        return self.norm(residual_TD) if x_TD is None else self.norm.add(x_TD, residual_TD)


class LlamaForCausalLM(CausalLM):
    """Llama and whatever shares its structure; a family differs in :meth:`read_config` and the table."""

    weight_table = decoder_table(LAYER_NORMS)

    def __init__(self, hf_config: HFConfig, options: BuildOptions) -> None:
        super().__init__(hf_config, options)
        config = self.read_config(hf_config)
        self.model = LlamaModel(config, options)
        self.tied = config.tied
        self.lm_head = (
            self.model.embed_tokens
            if config.tied
            else VocabParallelEmbedding(config.vocab_size, config.hidden_size, options)
        )

    @staticmethod
    def read_config(hf: HFConfig) -> DecoderConfig:
        """The settings in config.json; families built like Llama override this."""
        bias = read(hf, "attention_bias", bool, False)
        return read_decoder(hf, qkv_bias=bias, o_bias=bias, mlp_bias=read(hf, "mlp_bias", bool, False))

    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        return self.model(input_ids_T, positions_T, ctx)


class MistralForCausalLM(LlamaForCausalLM):
    """Llama with, in its first version, a sliding window in every layer."""

    @staticmethod
    def read_config(hf: HFConfig) -> DecoderConfig:
        window = read_optional(hf, "sliding_window", int, 4096) or 0
        return read_decoder(hf, windows=(window,) * read(hf, "num_hidden_layers", int))
