"""How layers store their keys and values, and how layers share blocks. Plain data, no torch."""

from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b for non-negative a."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class FullAttentionSpec:
    """A layer that attends to every earlier token. Sizes in tokens, heads and elements; dtype as torch names it."""

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str

    @property
    def page_size_bytes(self) -> int:
        """Bytes of keys and values of one layer in one block."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(FullAttentionSpec):
    """A layer that attends to the last ``sliding_window`` tokens, the current one included."""

    sliding_window: int = 0


KVCacheSpec = FullAttentionSpec | SlidingWindowSpec


def as_full_attention(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec of a layer of the same size that keeps every token."""
    return FullAttentionSpec(spec.block_size, spec.num_kv_heads, spec.head_size, spec.dtype)


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
