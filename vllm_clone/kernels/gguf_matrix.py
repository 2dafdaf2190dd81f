"""What the products with GGUF matrices take."""

from typing import NamedTuple

import torch


class GGUFMatrix(NamedTuple):
    """A matrix [N, K] as ``pack_gguf_linear`` made it."""

    packed: torch.Tensor
    ggml_type: int
    num_outputs: int
    """N."""
