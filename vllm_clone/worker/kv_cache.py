"""Allocating the KV cache and handing each attention layer its tensor."""

from collections.abc import Mapping

import torch

from vllm_clone.config.kv_cache import KV_DTYPES, KVCacheConfig, cdiv
from vllm_clone.kernels.arena import huge_pages
from vllm_clone.layers.attention import Attention


def bind_kv_cache(layers: Mapping[str, Attention], config: KVCacheConfig, device: torch.device) -> None:
    """Allocate the pool and give every layer its view: layer j of each group uses tensor j.

    The memory is not written here, so the operating system provides (huge) pages only as blocks are used.
    """
    page = max(group.spec.page_size_bytes for group in config.groups)
    for j in range(config.num_tensors):
        tensor = _allocate(config.num_blocks * page, device)
        for group in config.groups:
            if j < len(group.layer_names):
                layer = layers[group.layer_names[j]]
                shape = layer.backend.kv_cache_shape(config.num_blocks, group.spec)
                layer.kv_cache = tensor.view(getattr(torch, KV_DTYPES[group.spec.dtype].torch_name)).view(shape)


def _allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.from_numpy(huge_pages(num_bytes))
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def useful_bytes(config: KVCacheConfig, max_model_len: int, max_num_seqs: int) -> int:
    """Size of the pool at which ``max_num_seqs`` sequences of full length fit; more would never be used."""
    blocks = sum(cdiv(max_model_len, group.spec.block_size) for group in config.groups)
    return (max_num_seqs * blocks + 1) * config.bytes_per_block
