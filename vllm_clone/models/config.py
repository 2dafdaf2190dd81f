"""Typed reading of config.json's fields, and the settings that decoder families share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from vllm_clone.errors import ModelLoadError
from vllm_clone.layers.rotary import RopeConfig

HFConfig = Mapping[str, Any]
T = TypeVar("T", int, float, str, bool)
REQUIRED: Any = object()


def read(hf: HFConfig, key: str, kind: type[T], default: T = REQUIRED) -> T:
    """Field ``key`` as ``kind``; a missing or null field takes the default.

    Raises:
        ModelLoadError: missing without default, or of another type.
    """
    value = hf.get(key)
    if value is None:
        if default is REQUIRED:
            raise ModelLoadError(f"config.json: field {key!r} is missing")
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ModelLoadError(f"config.json: field {key!r} must be {kind.__name__}, found {value!r}")
    return value


def read_optional(hf: HFConfig, key: str, kind: type[T], default: T | None = None) -> T | None:
    """As ``read``, but null means None; only a missing field takes the default."""
    if key not in hf:
        return default
    return None if hf[key] is None else read(hf, key, kind)


def read_rope(
    hf: HFConfig, head_size: int, *, layer_type: str | None = None, default_theta: float = 10000.0
) -> RopeConfig:
    """The rotary embedding of layers of ``layer_type``.

    Reads ``rope_parameters`` (flat or keyed by layer type) and the older ``rope_theta`` with ``rope_scaling``.
    """
    parameters: dict[str, Any] = dict(hf.get("rope_scaling") or hf.get("rope_parameters") or {})
    if layer_type is not None and isinstance(parameters.get(layer_type), Mapping):
        parameters = dict(parameters[layer_type])
    theta = read(parameters, "rope_theta", float, read(hf, "rope_theta", float, default_theta))
    fraction = read(parameters, "partial_rotary_factor", float, read(hf, "partial_rotary_factor", float, 1.0))
    if hf.get("original_max_position_embeddings") is not None:
        parameters["original_max_position_embeddings"] = hf["original_max_position_embeddings"]
    factors = hf.get("rope_freq_factors")
    return RopeConfig(
        head_size=head_size,
        theta=theta,
        rope_type=read(parameters, "rope_type", str, read(parameters, "type", str, "default")),
        rotary_dim=int(head_size * fraction),
        max_position=read(hf, "max_position_embeddings", int, 2048),
        parameters=parameters,
        freq_factors=None if factors is None else tuple(factors),
    )


@dataclass(frozen=True)
class DecoderConfig:
    """What a decoder with rotary embeddings, RMS norms and a gated MLP is made of. Sizes are of the whole model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    activation: str
    norm_eps: float
    windows: tuple[int, ...]
    """Sliding window of each layer, 0 for full attention; its length is the number of layers."""
    ropes: tuple[RopeConfig, ...]
    """Rotary embedding of each layer."""
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    embed_scale: float = 1.0
    scale: float = 0.0
    """Factor on q·k."""
    score_cap: float = 0.0
    logit_cap: float = 0.0


def read_decoder(hf: HFConfig, *, head_size: int | None = None, **family: Any) -> DecoderConfig:
    """The fields every family spells alike; ``family`` gives the rest and wins over what is read here.

    Raises:
        ModelLoadError: a needed field is missing, of the wrong type, or contradicts another.
    """
    hidden, heads = read(hf, "hidden_size", int), read(hf, "num_attention_heads", int)
    layers = read(hf, "num_hidden_layers", int)
    kv_heads = read(hf, "num_key_value_heads", int, heads)
    size = read(hf, "head_dim", int, head_size or hidden // heads)
    if heads % kv_heads:
        raise ModelLoadError(f"config.json: {heads} attention heads cannot share {kv_heads} key-value heads")
    fields: dict[str, Any] = {
        "vocab_size": read(hf, "vocab_size", int),
        "hidden_size": hidden,
        "intermediate_size": read(hf, "intermediate_size", int),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_size": size,
        "activation": read(hf, "hidden_act", str, "silu"),
        "norm_eps": read(hf, "rms_norm_eps", float, 1e-6),
        "windows": (0,) * layers,
        "ropes": (),
        "tied": read(hf, "tie_word_embeddings", bool, False),
        "scale": size**-0.5,
    }
    fields |= family
    fields["ropes"] = fields["ropes"] or (read_rope(hf, size),) * layers
    return DecoderConfig(**fields)


def layer_types(hf: HFConfig, default: list[str]) -> list[str]:
    """Each layer's kind, "full_attention" or "sliding_attention", from the config or ``default``.

    Raises:
        ModelLoadError: another kind, or not one per layer.
    """
    kinds = cast(list[str], hf.get("layer_types") or default)
    expected = read(hf, "num_hidden_layers", int)
    if len(kinds) != expected:
        raise ModelLoadError(f"config.json: expected {expected} layer_types, found {len(kinds)}")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelLoadError(f"config.json: unknown layer types {', '.join(unknown)}")
    return kinds


def windows_of(kinds: list[str], sliding_window: int | None) -> tuple[int, ...]:
    """Each layer's window: ``sliding_window`` for sliding layers, 0 for full ones."""
    return tuple((sliding_window or 0) if kind == "sliding_attention" else 0 for kind in kinds)
