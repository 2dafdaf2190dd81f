"""Tables from the names in a checkpoint to the parameters of a model."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_clone.errors import ModelLoadError

IGNORED_LEAVES = frozenset({"inv_freq", "masked_bias"})
"""Buffers that old checkpoints carry and models compute themselves."""


@dataclass(frozen=True, slots=True)
class To:
    """Where a checkpoint's module goes.

    Args:
        module: path of ours; ``*`` stands for the layer number that the source name had.
        shard: which of the stacked matrices of that module it is.
        transpose: the checkpoint stores the matrix as [in, out].
    """

    module: str
    shard: str | None = None
    transpose: bool = False


@dataclass(frozen=True, slots=True)
class Destination:
    """One tensor's place: parameter ``leaf`` of ``module``, possibly one shard of it."""

    module: str
    leaf: str
    shard: str | None
    transpose: bool


@dataclass(frozen=True)
class WeightTable:
    """A family's checkpoint layout.

    Args:
        rows: checkpoint module path, with ``*`` for the layer number, → its destination.
        ignored: full names, with ``*``, of tensors that carry nothing to load.
        optional_prefix: some checkpoints of the family lack this prefix.
    """

    rows: Mapping[str, To]
    ignored: frozenset[str] = frozenset()
    optional_prefix: str = ""

    def locate(self, name: str) -> Destination | None:
        """Destination of the tensor called ``name``; None for one that is safely ignored.

        Raises:
            ModelLoadError: the name means nothing to this family.
        """
        parts = name.split(".")
        pattern = ".".join("*" if part.isdecimal() else part for part in parts)
        path, _, leaf = pattern.rpartition(".")
        prefixed = self.optional_prefix + pattern
        if leaf in IGNORED_LEAVES or pattern in self.ignored or prefixed in self.ignored:
            return None
        row = self.rows.get(path) or self.rows.get(self.optional_prefix + path)
        if row is None:
            raise ModelLoadError("the model has no such tensor")
        layer = next((part for part in parts if part.isdecimal()), "")
        return Destination(row.module.replace("*", layer), leaf, row.shard, row.transpose)

    def source_name(self, module: str, leaf: str, shard: str | None) -> str:
        """The checkpoint's name for what fills ``leaf`` of ``module``, for messages."""
        layer = next((part for part in module.split(".") if part.isdecimal()), "")
        for source, row in self.rows.items():
            if row.module.replace("*", layer) == module and row.shard in (shard, None):
                return f"{source.replace('*', layer)}.{leaf}"
        return f"{module}.{leaf}"


def decoder_table(norms: Mapping[str, str]) -> WeightTable:
    """The layout that Llama set and most decoders follow.

    Args:
        norms: the norms of a layer, by the checkpoint's name → ours.
    """
    layer, attention, mlp = "model.layers.*", "model.layers.*.self_attn", "model.layers.*.mlp"
    rows = {
        "model.embed_tokens": To("model.embed_tokens"),
        "model.norm": To("model.norm"),
        "lm_head": To("lm_head"),
        f"{attention}.o_proj": To(f"{attention}.o_proj"),
        f"{mlp}.gate_proj": To(f"{mlp}.gate_up_proj", "gate"),
        f"{mlp}.up_proj": To(f"{mlp}.gate_up_proj", "up"),
        f"{mlp}.down_proj": To(f"{mlp}.down_proj"),
    }
    rows |= {f"{attention}.{x}_proj": To(f"{attention}.qkv_proj", x) for x in "qkv"}
    rows |= {f"{layer}.{source}": To(f"{layer}.{target}") for source, target in norms.items()}
    return WeightTable(rows)
