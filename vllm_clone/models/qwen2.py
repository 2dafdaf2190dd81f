"""Qwen2 and Qwen2.5: Llama's structure with biases on queries, keys and values."""

from vllm_clone.models.config import DecoderConfig, HFConfig, layer_types, read, read_decoder, read_optional, windows_of
from vllm_clone.models.llama import LlamaForCausalLM


def read_windows(hf: HFConfig) -> tuple[int, ...]:
    """Windows of the layers: with ``use_sliding_window``, those from ``max_window_layers`` on slide."""
    window = read_optional(hf, "sliding_window", int, 4096) if read(hf, "use_sliding_window", bool, False) else None
    layers, first = read(hf, "num_hidden_layers", int), read(hf, "max_window_layers", int, 28)
    default = ["sliding_attention" if window and i >= first else "full_attention" for i in range(layers)]
    return windows_of(layer_types(hf, default), window)


class Qwen2ForCausalLM(LlamaForCausalLM):
    @staticmethod
    def read_config(hf: HFConfig) -> DecoderConfig:
        return read_decoder(hf, qkv_bias=True, windows=read_windows(hf))
