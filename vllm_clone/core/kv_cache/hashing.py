"""Block hashes: a chain that identifies a block by its tokens and everything before them.

``hash_i = H(hash_{i-1}, tokens of block i, extra)``. The root depends on PYTHONHASHSEED when that is set, so
that processes can be made to agree or to differ; otherwise sha256 roots are a constant and xxhash roots random.
"""

import functools
import hashlib
import os
import struct
from collections.abc import Callable, Sequence
from typing import Any

from vllm_clone import envs

BlockHash = bytes
Hasher = Callable[[BlockHash, Sequence[int], str | None], BlockHash]
"""(parent, tokens of one block, cache salt or None) → hash of the block."""


@functools.cache
def _packer(num_tokens: int) -> struct.Struct:
    return struct.Struct(f"<II{num_tokens}I")


def _flat(parent: bytes, tokens: Sequence[int], salt: str | None) -> bytes:
    """An unambiguous byte string: length-prefixed parent, 32-bit tokens, salt."""
    body = _packer(len(tokens)).pack(len(parent), len(tokens), *tokens)
    return body + parent + (b"" if salt is None else b"\x01" + salt.encode())


def _cbor(parent: bytes, tokens: Sequence[int], salt: str | None) -> bytes:
    import cbor2

    extra: Any = None if salt is None else [["cache_salt", salt]]
    return bytes(cbor2.dumps([parent, list(tokens), extra], canonical=True))


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xxh128(data: bytes) -> bytes:
    import xxhash

    return bytes(xxhash.xxh3_128_digest(data))


_ALGORITHMS: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes, Sequence[int], str | None], bytes]]] = {
    "sha256": (_sha256, _flat),
    "sha256_cbor": (_sha256, _cbor),
    "xxhash": (_xxh128, _flat),
    "xxhash_cbor": (_xxh128, _cbor),
}


def make_hasher(algorithm: str) -> tuple[Hasher, BlockHash]:
    """The hash function and the root of its chain for a ``prefix_caching_hash_algo``."""
    digest, encode = _ALGORITHMS[algorithm]
    seed = envs.PYTHONHASHSEED
    if seed and seed != "random":
        root = digest(seed.encode())
    elif algorithm.startswith("sha256"):
        root = digest(b"vllm_clone block chain")
    else:
        root = digest(os.urandom(16))
    return (lambda parent, tokens, salt: digest(encode(parent, tokens, salt))), root
