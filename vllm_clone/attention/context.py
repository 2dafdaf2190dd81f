"""What a forward pass needs besides its tokens. Passed as an argument, never global."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_clone.attention.metadata import AttentionMetadata


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Attention metadata by layer name; layers of one KV cache group map to the same object."""

    metadata: Mapping[str, AttentionMetadata]
