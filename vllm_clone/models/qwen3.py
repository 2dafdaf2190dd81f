"""Qwen3 (dense): Llama's structure with an RMS norm on every query and key head."""

from vllm_clone.models.checkpoint import To, WeightTable
from vllm_clone.models.config import DecoderConfig, HFConfig, read, read_decoder
from vllm_clone.models.llama import LlamaForCausalLM
from vllm_clone.models.qwen2 import read_windows


class Qwen3ForCausalLM(LlamaForCausalLM):
    weight_table = WeightTable(
        {
            **LlamaForCausalLM.weight_table.rows,
            "model.layers.*.self_attn.q_norm": To("model.layers.*.self_attn.q_norm"),
            "model.layers.*.self_attn.k_norm": To("model.layers.*.self_attn.k_norm"),
        }
    )

    @staticmethod
    def read_config(hf: HFConfig) -> DecoderConfig:
        bias = read(hf, "attention_bias", bool, False)
        return read_decoder(hf, head_size=128, qkv_bias=bias, o_bias=bias, qk_norm=True, windows=read_windows(hf))
