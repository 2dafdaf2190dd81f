"""The GGUF reader: what it reads, and how it refuses what is not whole."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hub.gguf_bytes import ARRAY, BOOL, F32, I32, LLAMA, STRING, U32, gguf_bytes, smollm2, tensor, text, write
from vllm_clone.errors import ConfigError
from vllm_clone.hub.gguf import BLOCK_SIZES, GGMLType, GGUFFile


@pytest.mark.parametrize(
    ("kind", "content"),
    [(0, 255), (1, -128), (2, 65535), (3, -32768), (4, 2**32 - 1), (5, -(2**31)), (6, 0.5), (7, True), (7, False),
     (8, "naïve 日本"), (8, ""), (10, 2**64 - 1), (11, -(2**63)), (12, 0.1)],
)  # fmt: skip
def test_every_scalar_type_is_read(tmp_path: Path, kind: int, content: object) -> None:
    file = GGUFFile(write(tmp_path / "m.gguf", {"key": (kind, content)}))
    assert file.metadata == {"key": content}
    assert type(file.metadata["key"]) is type(content)


@pytest.mark.parametrize(
    "content",
    [(I32, [1, -2, 3]), (F32, [0.5, -1.0]), (BOOL, [True, False]), (STRING, ["a", "", "é"]), (U32, []),
     (ARRAY, [(I32, [1, 2]), (STRING, ["x"])])],
)  # fmt: skip
def test_arrays_are_lists(tmp_path: Path, content: tuple[int, list[object]]) -> None:
    file = GGUFFile(write(tmp_path / "m.gguf", {"list": (ARRAY, content), "after": (U32, 7)}))
    plain = [items for _, items in content[1]] if content[0] == ARRAY else content[1]  # type: ignore[misc, has-type]
    assert file.metadata == {"list": plain, "after": 7}


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read(tmp_path: Path, version: int) -> None:
    assert GGUFFile(write(tmp_path / "m.gguf", {"a": (U32, 1)}, version=version)).metadata == {"a": 1}


def test_tensors_have_shapes_outermost_first_and_bytes_of_their_own(tmp_path: Path) -> None:
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    path = write(tmp_path / "m.gguf", {}, (tensor("t", (3, 2), offset=32),), bytes(32) + rows.tobytes())
    file = GGUFFile(path)
    assert file.tensors["t"].shape == (2, 3)
    assert file.tensors["t"].ggml_type is GGMLType.F32
    assert np.array_equal(np.frombuffer(file.tensor_bytes("t"), np.float32).reshape(2, 3), rows)


def test_alignment_in_the_metadata_moves_the_data(tmp_path: Path) -> None:
    head = gguf_bytes({"general.alignment": (U32, 128)}, (tensor("t", (1,)),)).rstrip(b"\0")
    path = tmp_path / "m.gguf"
    path.write_bytes(head + bytes(128 + -len(head) % 128))
    file = GGUFFile(path)
    assert file.tensors["t"].offset % 128 == 0
    with path.open("r+b") as handle:
        handle.truncate(file.tensors["t"].offset + 3)
    with pytest.raises(ConfigError, match="truncated: tensor t "):
        GGUFFile(path)


def test_block_sizes_are_those_of_ggml() -> None:
    for kind, size in BLOCK_SIZES.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(int(kind))] == size
        assert gguf.GGMLQuantizationType(int(kind)).name == kind.name
    assert set(BLOCK_SIZES) == set(GGMLType)


def test_the_real_file_reads_as_the_gguf_package_reads_it() -> None:
    ours = GGUFFile(smollm2())
    theirs = gguf.GGUFReader(smollm2())
    fields = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == fields
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for t in theirs.tensors:
        mine = ours.tensors[t.name]
        assert (mine.shape, int(mine.ggml_type), mine.offset, mine.nbytes) == (
            tuple(int(d) for d in reversed(t.shape)),
            int(t.tensor_type),
            int(t.data_offset),
            int(t.n_bytes),
        )


def test_without_the_vocabulary_only_the_tokenizers_arrays_are_missing() -> None:
    whole, light = GGUFFile(smollm2()), GGUFFile(smollm2(), vocabulary=False)
    assert light.tensors == whole.tensors
    missing = whole.metadata.keys() - light.metadata.keys()
    assert missing == {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"}


def test_tokens_are_found_without_reading_the_vocabulary() -> None:
    light, tokens = GGUFFile(smollm2(), vocabulary=False), GGUFFile(smollm2()).metadata["tokenizer.ggml.tokens"]
    for index in (0, 2, 1000, len(tokens) - 1):
        assert light.find_token(tokens[index]) == index
    assert light.find_token("<|no such token|>") is None
    assert light.find_token("<|im_en") is None


def test_a_file_without_tokens_has_none_to_find(tmp_path: Path) -> None:
    assert GGUFFile(write(tmp_path / "m.gguf", LLAMA)).find_token("a") is None


# ---- refusals ----


def bad(tmp_path: Path, raw: bytes) -> str:
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    with pytest.raises(ConfigError) as caught:
        GGUFFile(path)
    message = str(caught.value)
    assert "bad.gguf" in message
    assert "\n" not in message
    return message


def test_another_magic_is_no_gguf_file(tmp_path: Path) -> None:
    assert "does not begin with the bytes GGUF" in bad(tmp_path, b"GGML" + bytes(100))


def test_an_empty_file_is_no_gguf_file(tmp_path: Path) -> None:
    assert "is not a GGUF file" in bad(tmp_path, b"")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.gguf cannot be opened: No such file"):
        GGUFFile(tmp_path / "none.gguf")


def test_a_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be opened: Is a directory"):
        GGUFFile(tmp_path)


@pytest.mark.parametrize("version", [0, 1, 4, 99])
def test_other_versions_are_named(tmp_path: Path, version: int) -> None:
    assert f"GGUF version {version};" in bad(tmp_path, gguf_bytes({}, version=version))


def test_big_endian_files_are_told_from_unknown_versions(tmp_path: Path) -> None:
    assert "is big-endian" in bad(tmp_path, b"GGUF" + struct.pack(">IQQ", 3, 0, 0))


def test_impossible_counts_are_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    assert "header counts" in bad(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0))
    assert "header counts" in bad(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 0, 2**40))


def test_an_array_longer_than_the_file_is_damage(tmp_path: Path) -> None:
    for kind in (I32, STRING, ARRAY):
        head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("key") + struct.pack("<IIQ", ARRAY, kind, 2**62)
        assert "damaged" in bad(tmp_path, head)


def test_a_string_longer_than_the_file_is_damage(tmp_path: Path) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63) + b"key"
    assert "damaged near byte" in bad(tmp_path, head)


def test_arrays_nested_without_end_are_damage(tmp_path: Path) -> None:
    nested = struct.pack("<IQ", ARRAY, 1) * 5000
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("key") + struct.pack("<I", ARRAY)
    assert "damaged" in bad(tmp_path, head + nested)


def test_an_unknown_metadata_type_is_damage(tmp_path: Path) -> None:
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("key") + struct.pack("<I", 13)
    assert "unknown metadata type 13" in bad(tmp_path, head + bytes(8))


@pytest.mark.parametrize("alignment", [(U32, 0), (STRING, "32"), (I32, -32)])
def test_an_impossible_alignment_is_damage(tmp_path: Path, alignment: tuple[int, object]) -> None:
    assert "general.alignment" in bad(tmp_path, gguf_bytes({"general.alignment": alignment}))


def test_an_unknown_storage_type_names_the_tensor(tmp_path: Path) -> None:
    raw = gguf_bytes({}, (tensor("blk.0.x", (32,), kind=4),), bytes(64))
    assert "tensor blk.0.x has the unknown storage type 4" in bad(tmp_path, raw)


def test_a_tensor_that_ends_outside_the_file_is_named(tmp_path: Path) -> None:
    raw = gguf_bytes({}, (tensor("here", (8,)), tensor("gone", (8,), offset=32)), bytes(60))
    assert "truncated: tensor gone should end at byte" in bad(tmp_path, raw)
    assert "tensor far " in bad(tmp_path, gguf_bytes({}, (tensor("far", (8,), offset=2**62),), bytes(60)))
    assert "tensor huge " in bad(tmp_path, gguf_bytes({}, (tensor("huge", (2**60, 2**60)),), bytes(60)))


def test_rows_must_be_whole_blocks(tmp_path: Path) -> None:
    raw = gguf_bytes({}, (tensor("odd", (48, 2), kind=int(GGMLType.Q4_0)),), bytes(4096))
    assert "rows of 48 values in tensor odd are no multiple of the 32 values of a Q4_0 block" in bad(tmp_path, raw)


def test_a_tensor_listed_twice_is_damage(tmp_path: Path) -> None:
    assert "holds tensor t twice" in bad(tmp_path, gguf_bytes({}, (tensor("t", (1,)), tensor("t", (1,))), bytes(64)))


SMALL = gguf_bytes(
    LLAMA | {"tokenizer.ggml.tokens": (ARRAY, (STRING, ["a", "b"])), "x": (ARRAY, (I32, [1, 2]))},
    (tensor("token_embd.weight", (32, 2)), tensor("q", (32,), kind=int(GGMLType.Q8_0), offset=256)),
    bytes(320),
)


@pytest.mark.parametrize("vocabulary", [True, False])
def test_every_shorter_file_is_refused(tmp_path: Path, vocabulary: bool) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(SMALL)
    last = max(t.offset + t.nbytes for t in GGUFFile(path).tensors.values())
    for end in range(0, last, 3):
        path.write_bytes(SMALL[:end])
        with pytest.raises(ConfigError):
            GGUFFile(path, vocabulary=vocabulary)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(4, 520), byte=st.integers(0, 255))
def test_any_changed_byte_is_read_or_refused_never_worse(tmp_path: Path, position: int, byte: int) -> None:
    raw = bytearray(SMALL)
    raw[position] = byte
    path = tmp_path / "changed.gguf"
    path.write_bytes(raw)
    try:
        file = GGUFFile(path)
    except ConfigError:
        return
    for t in file.tensors.values():
        assert len(file.tensor_bytes(t.name)) == t.nbytes
