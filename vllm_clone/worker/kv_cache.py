"""Allocating the KV cache and handing each attention layer its tensor."""

from collections.abc import Mapping, Sequence

import torch

from vllm_clone.config.kv_cache import KV_DTYPES, KVCacheConfig, cdiv
from vllm_clone.kernels.arena import huge_pages
from vllm_clone.layers.attention import Attention
from vllm_clone.platforms import cpu

AHEAD_BYTES = 512 << 20
"""How much of the pool is provided beyond what has been used."""
_PIECE = 2 << 20


class PagesAhead:
    """Has the system provide memory of the pool before blocks are used, in time that would be idle.

    The system hands out memory page by page when it is first written, and in a virtual machine whose host does the same
    that may take as long as computing what is written there. Blocks are used in ascending order at first.

    Args:
        tensors: the pool's, uint8, of one length and from :func:`~vllm_clone.kernels.arena.huge_pages`.
        num_slots: tokens that each of them has room for.
        ahead_bytes: provided beyond the last block used, in all tensors together.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], num_slots: int, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._tensors = tensors
        self._size = tensors[0].nbytes
        self._slot_bytes = self._size // num_slots
        self._ahead = cdiv(ahead_bytes // len(tensors), _PIECE) * _PIECE
        self._provided = 0
        """Bytes of every tensor, and the next piece of so many of them."""
        self._and_of = 0
        self._goal = min(self._ahead, self._size)

    def used(self, slot: int) -> None:
        """A slot is written to now; so were all before it."""
        self._goal = max(self._goal, min((slot + 1) * self._slot_bytes + self._ahead, self._size))

    def provide(self) -> bool:
        """A few milliseconds of it; whether there is more to do."""
        if self._provided >= self._goal:
            return False
        tensor = self._tensors[self._and_of]
        piece = tensor[self._provided : self._provided + _PIECE]
        if not cpu.populate(piece.data_ptr(), piece.nbytes):  # memory is short, or the kernel is old
            self._provided = self._size
            return False
        self._and_of += 1
        if self._and_of == len(self._tensors):
            self._and_of, self._provided = 0, self._provided + _PIECE
        return self._provided < self._goal


def bind_kv_cache(layers: Mapping[str, Attention], config: KVCacheConfig, device: torch.device) -> list[torch.Tensor]:
    """Allocate the pool and give every layer its view: layer j of each group uses tensor j; the tensors, uint8.

    The memory is not written here, so the operating system provides (huge) pages only as blocks are used.
    """
    page = max(group.spec.page_size_bytes for group in config.groups)
    tensors = [_allocate(config.num_blocks * page, device) for _ in range(config.num_tensors)]
    for j, tensor in enumerate(tensors):
        for group in config.groups:
            if j < len(group.layer_names):
                layer = layers[group.layer_names[j]]
                shape = layer.backend.kv_cache_shape(config.num_blocks, group.spec)
                layer.kv_cache = tensor.view(getattr(torch, KV_DTYPES[group.spec.dtype].torch_name)).view(shape)
    return tensors


def _allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu":
        return torch.from_numpy(huge_pages(num_bytes))
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def useful_bytes(config: KVCacheConfig, max_model_len: int, max_num_seqs: int) -> int:
    """Size of the pool at which ``max_num_seqs`` sequences of full length fit; more would never be used."""
    blocks = sum(cdiv(max_model_len, group.spec.block_size) for group in config.groups)
    return (max_num_seqs * blocks + 1) * config.bytes_per_block
