"""How layers store their keys and values, and how layers share blocks. Plain data, no torch."""

from dataclasses import dataclass
from typing import NamedTuple


class KVElement(NamedTuple):
    """How a cached number is stored: torch's name of the type, bytes, and bytes of scale per token and head."""

    torch_name: str
    num_bytes: int
    scale_bytes: int = 0


KV_DTYPES = {
    "float32": KVElement("float32", 4),
    "float16": KVElement("float16", 2),
    "bfloat16": KVElement("bfloat16", 2),
    "fp8_e4m3": KVElement("float8_e4m3fn", 1),
    "fp8_e5m2": KVElement("float8_e5m2", 1),
    "fp8_per_token_head": KVElement("float8_e4m3fn", 1, 4),
    "int8_per_token_head": KVElement("int8", 1, 4),
}
"""What a cache can be made of. Plain 8-bit floats are stored as they are and end at the type's largest number; with
scales, each token's key and value of a head uses the type's whole range."""

_KV_ALIASES = {"fp8": "fp8_e4m3", "int8": "int8_per_token_head"}
_MLA_ONLY = "it is a layout of MLA layers, which no model here has"
_BELOW_8_BITS = "the CPU kernels store no elements of fewer than 8 bits"
_NOT_HERE = {
    "fp8_ds_mla": _MLA_ONLY,
    "nvfp4_ds_mla": _MLA_ONLY,
    "fp8_inc": "it is the 8-bit float of another vendor's accelerator; use fp8",
    "nvfp4": _BELOW_8_BITS,
    "nvfp4_4over6": _BELOW_8_BITS,
    "int4_per_token_head": _BELOW_8_BITS,
    "turboquant_3bit_nc": _BELOW_8_BITS,
    "turboquant_4bit_nc": _BELOW_8_BITS,
    "turboquant_k3v4_nc": _BELOW_8_BITS,
    "turboquant_k8v4": _BELOW_8_BITS,
    "ultraquant_4bit": _BELOW_8_BITS,
}


def parse_kv_cache_dtype(text: str) -> str:
    """The value of ``--kv-cache-dtype`` as it is. Raises ValueError with the reason for a known type not served."""
    if text in _NOT_HERE:
        raise ValueError(f"not served: {_NOT_HERE[text]}")
    return text


def kv_dtype_name(asked: str, model_dtype: str) -> str:
    """The key of :data:`KV_DTYPES` that ``--kv-cache-dtype`` means for a model of ``model_dtype``."""
    return model_dtype if asked == "auto" else _KV_ALIASES.get(asked, asked)


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b for non-negative a."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """A layer that attends to every earlier token. Sizes in tokens, heads and elements; dtype: see KV_DTYPES."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str

    @property
    def page_size_bytes(self) -> int:
        """Bytes of keys and values of one layer in one block."""
        element = KV_DTYPES[self.dtype]
        head_bytes = self.head_size * element.num_bytes + element.scale_bytes
        return 2 * self.block_size * self.num_kv_heads * head_bytes


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(FullAttentionSpec):
    """A layer that attends to the last ``sliding_window`` tokens, the current one included."""

    sliding_window: int = 0


KVCacheSpec = FullAttentionSpec | SlidingWindowSpec


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers with one spec; they share a block table."""

    layer_names: tuple[str, ...]
    spec: KVCacheSpec


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """The pool: ``num_blocks`` blocks (block 0 is the null block), shared by all groups.

    Physical tensor j serves layer j of every group, because a block belongs to one group at a time.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]

    @property
    def num_tensors(self) -> int:
        return max(len(g.layer_names) for g in self.groups)

    @property
    def bytes_per_block(self) -> int:
        return max(g.spec.page_size_bytes for g in self.groups) * self.num_tensors


def group_layers(specs: dict[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Bucket layers by spec and split buckets into groups of one size, so every group fits the same tensors.

    Group size is the smallest bucket, or the largest when it is under 1.5 × the smallest (the small one is
    then padded). Layer j of a bucket goes to group j mod (number of groups), which keeps stages balanced.
    Specs must agree in page size; models of one head geometry do.
    """
    buckets: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        buckets.setdefault(spec, []).append(name)
    sizes = [len(names) for names in buckets.values()]
    size = max(sizes) if max(sizes) < 1.5 * min(sizes) else min(sizes)
    groups: list[KVCacheGroup] = []
    for spec, names in sorted(buckets.items(), key=lambda item: isinstance(item[0], SlidingWindowSpec)):
        count = cdiv(len(names), size)
        groups += [KVCacheGroup(tuple(names[i::count]), spec) for i in range(count)]
    return tuple(groups)
