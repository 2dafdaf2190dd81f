"""While a checkpoint is read, this process holds little more than the packed weights: no second copy, no whole file."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.models.harness import load
from vllm_clone.model_loader.checkpoint import Checkpoint, SafetensorsCheckpoint, TorchCheckpoint
from vllm_clone.model_loader.loader import weight_bytes
from vllm_clone.platforms.cpu import MappedFile

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell what is mapped")
MIB = 1 << 20
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "hidden_size": 512,
    "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
}  # fmt: skip


def tensors() -> dict[str, torch.Tensor]:
    """66 MiB of weights for CONFIG."""
    width, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (CONFIG["vocab_size"], width), "norm": (width,)}
    for i in range(CONFIG["num_hidden_layers"]):
        shapes |= {f"layers.{i}.self_attn.{x}_proj": (width, width) for x in "qkvo"}
        shapes |= {f"layers.{i}.mlp.{x}_proj": (inner, width) for x in ("gate", "up")}
        shapes |= {f"layers.{i}.mlp.down_proj": (width, inner)}
        shapes |= {f"layers.{i}.{x}_layernorm": (width,) for x in ("input", "post_attention")}
    return {f"model.{name}.weight": torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}


def write(directory: Path, suffix: str) -> Path:
    if suffix == "safetensors":
        path = directory / "model.safetensors"
        save_file(tensors(), path)
    else:
        path = directory / "pytorch_model.bin"
        torch.save(tensors(), path)
    return path


def status(field: str) -> int:
    """Bytes of VmRSS, now in memory with file pages, or VmHWM, the most since the last reset."""
    return int(re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) << 10  # type: ignore[index]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_the_peak_is_at_most_three_tenths_above_the_weights(suffix: str, tmp_path: Path) -> None:
    write(tmp_path, suffix)
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = status("VmRSS")
    model = load(tmp_path, CONFIG, dtype="bfloat16", max_model_len=64)
    assert weight_bytes(model) > 60 * MIB
    assert status("VmHWM") - before <= 1.3 * weight_bytes(model)


def mapped_bytes(path: Path) -> int:
    """How much of a file is in this process's memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            total += int(line.split()[1]) << 10
    return total


def read_all(checkpoint: Checkpoint) -> Iterator[torch.Tensor]:
    for tensor in checkpoint.tensors():
        data = tensor.read()
        assert not data.any()  # reads every page
        yield data


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_file_is_never_in_memory_as_a_whole(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path, suffix)
    checkpoint = SafetensorsCheckpoint([path]) if suffix == "safetensors" else TorchCheckpoint([path])
    seen = [(mapped_bytes(path), data.nbytes) for data in read_all(checkpoint)]
    assert max(mapped for mapped, _ in seen) >= 2 * MIB  # it is mapped, and was read
    assert all(mapped <= nbytes + MIB for mapped, nbytes in seen)  # the system maps some pages around those


def test_what_was_dropped_can_be_read_again_and_other_memory_is_left_alone(tmp_path: Path) -> None:
    path, other = tmp_path / "ones", torch.ones(MIB)
    torch.ones(MIB).numpy().tofile(path)
    data = torch.from_file(str(path), size=MIB)
    mapped = MappedFile(path)
    assert data.all()
    mapped.drop_pages()
    assert mapped_bytes(path) == 0
    assert data.all()
    assert mapped_bytes(path) == 4 * MIB
    assert other.all()


def test_a_file_that_is_not_mapped_costs_nothing(tmp_path: Path) -> None:
    other = torch.ones(MIB)
    MappedFile(tmp_path / "absent").drop_pages()
    assert other.all()
