"""The block hash chain."""

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_clone.core.kv_cache.hashing import make_hasher
from vllm_clone.core.request import BlockHasher

ALGORITHMS = ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]


@pytest.fixture(autouse=True)
def no_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def chain(algorithm: str, tokens: list[int], salt: str | None = None, block_size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    BlockHasher(block_size, *make_hasher(algorithm)).extend(hashes, tokens, salt)
    return hashes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_full_blocks_are_hashed(algorithm: str) -> None:
    assert [len(chain(algorithm, list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_extending_a_chain_equals_hashing_it_at_once(algorithm: str) -> None:
    hasher = BlockHasher(4, *make_hasher(algorithm))
    tokens = list(range(17))
    grown: list[bytes] = []
    for end in range(len(tokens) + 1):
        hasher.extend(grown, tokens[:end], None)
    at_once: list[bytes] = []
    hasher.extend(at_once, tokens, None)
    assert grown == at_once


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_hash_depends_on_its_tokens_and_on_everything_before(algorithm: str) -> None:
    hasher = BlockHasher(2, *make_hasher(algorithm))

    def hashes(tokens: list[int], salt: str | None = None) -> list[bytes]:
        out: list[bytes] = []
        hasher.extend(out, tokens, salt)
        return out

    base = hashes([1, 2, 3, 4])
    assert hashes([1, 2, 3, 5])[0] == base[0]
    assert hashes([1, 2, 3, 5])[1] != base[1]
    assert hashes([9, 2, 3, 4])[1] != base[1]
    assert len({*base, *hashes([1, 2, 3, 4], "salt"), *hashes([1, 2, 3, 4], "")}) == 6


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_sha256_chains_agree_between_processes(algorithm: str) -> None:
    program = (
        "from tests.core.test_hashing import chain\n"
        f"print(chain({algorithm!r}, list(range(8)))[-1].hex())"
    )  # fmt: skip
    root = Path(__file__).parents[2]
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    assert other.stdout.strip() == chain(algorithm, list(range(8)))[-1].hex()


@pytest.mark.parametrize("algorithm", ["xxhash", "xxhash_cbor"])
def test_xxhash_roots_are_random_unless_seeded(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_hasher(algorithm)[1] != make_hasher(algorithm)[1]
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert make_hasher(algorithm)[1] == make_hasher(algorithm)[1]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_python_hash_seed_changes_every_chain(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    one = chain(algorithm, [1, 2, 3, 4])
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert chain(algorithm, [1, 2, 3, 4]) != one


def test_sha256_cbor_hashes_the_canonical_cbor_of_parent_tokens_and_extras() -> None:
    import hashlib

    hasher, _ = make_hasher("sha256_cbor")
    # [h'61', [1, 500], null] in RFC 8949 canonical form
    data = bytes.fromhex("83416182011901f4f6")
    assert hasher(b"a", [1, 500], None) == hashlib.sha256(data).digest()
