"""Weights without a checkpoint, for measuring and testing."""

import zlib

import torch
from torch import nn

from vllm_clone.layers.weights import WeightModule


def fill_with_dummies(model: nn.Module) -> None:
    """Random weights that depend on nothing but the parameters' names, so every start gives the same model.

    Matrices are uniform in ±0.05, norm weights 1 and biases 0, which keeps activations in a sane range.
    """
    for path, module in model.named_modules():
        if not isinstance(module, WeightModule):
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            shape = module.full_shape(name)
            if len(shape) > 1:
                generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(f"{path}.{name}".encode()))
                data = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
                data.uniform_(-0.05, 0.05, generator=generator)
            else:
                data = torch.full(shape, 1.0 if name == "weight" else 0.0)
            module.load_weight(name, data)
        module.prepare()
