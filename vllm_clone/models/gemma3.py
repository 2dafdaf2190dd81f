"""Gemma 3 (text): five sliding layers to each full one, a rotary base for each kind, normalised queries and keys."""

from vllm_clone.models.checkpoint import To, WeightTable
from vllm_clone.models.config import DecoderConfig, HFConfig, layer_types, read, read_optional, read_rope, windows_of
from vllm_clone.models.gemma2 import Gemma2ForCausalLM, read_gemma


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    weight_table = WeightTable(
        {
            **Gemma2ForCausalLM.weight_table.rows,
            "model.layers.*.self_attn.q_norm": To("model.layers.*.self_attn.q_norm"),
            "model.layers.*.self_attn.k_norm": To("model.layers.*.self_attn.k_norm"),
        }
    )

    @staticmethod
    def read_config(hf: HFConfig) -> DecoderConfig:
        layers, period = read(hf, "num_hidden_layers", int), read(hf, "sliding_window_pattern", int, 6)
        default = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]
        kinds = layer_types(hf, default)
        size = read(hf, "head_dim", int, 256)
        ropes = {
            "full_attention": read_rope(hf, size, layer_type="full_attention", default_theta=1_000_000.0),
            "sliding_attention": read_rope(_local_rope(hf), size, layer_type="sliding_attention"),
        }
        return read_gemma(
            hf,
            windows=windows_of(kinds, read_optional(hf, "sliding_window", int, 4096)),
            ropes=tuple(ropes[kind] for kind in kinds),
            qk_norm=True,
            score_cap=read_optional(hf, "attn_logit_softcapping", float) or 0.0,
            logit_cap=read_optional(hf, "final_logit_softcapping", float) or 0.0,
        )


def _local_rope(hf: HFConfig) -> HFConfig:
    """The config as sliding layers see it: older files give them ``rope_local_base_freq`` and no scaling."""
    if "sliding_attention" in (hf.get("rope_parameters") or {}):
        return hf
    theta = read(hf, "rope_local_base_freq", float, 10_000.0)
    return {**hf, "rope_parameters": None, "rope_scaling": None, "rope_theta": theta}
