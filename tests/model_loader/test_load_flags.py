"""Flags of the Load group choose files and how they are read."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.models.families import VARIANTS, build, save
from vllm_clone.config import LoadConfig
from vllm_clone.errors import ModelLoadError
from vllm_clone.model_loader import loader
from vllm_clone.model_loader.checkpoint import SafetensorsCheckpoint, TorchCheckpoint
from vllm_clone.model_loader.loader import open_checkpoint

Reads = list[tuple[list[str], int, int]]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """Files, threads and block size of every read ahead."""
    seen: Reads = []
    monkeypatch.setattr(loader, "prefetch", lambda files, n, size: seen.append(([f.name for f in files], n, size)))
    return seen


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save_file({"a": torch.zeros(4)}, tmp_path / "model.safetensors")
    torch.save({"a": torch.zeros(4)}, tmp_path / "pytorch_model.bin")
    return tmp_path


def opened(path: Path, **flags: Any) -> Any:
    return open_checkpoint(path, LoadConfig(**flags), torch.float32)


def test_lazy_files_are_mapped_eager_ones_read_whole_and_prefetched_ones_read_ahead(checkpoint: Path, reads: Reads):
    assert opened(checkpoint) == SafetensorsCheckpoint([checkpoint / "model.safetensors"])
    assert opened(checkpoint, safetensors_load_strategy="lazy") == opened(checkpoint)
    assert opened(checkpoint, safetensors_load_strategy="eager").whole
    assert reads == []
    flags = {"safetensors_prefetch_num_threads": 3, "safetensors_prefetch_block_size": 512}
    opened(checkpoint, safetensors_load_strategy="prefetch", **flags)
    assert reads == [(["model.safetensors"], 3, 512)]


@pytest.mark.parametrize(("load_format", "name"), [("safetensors", "model.safetensors"), ("pt", "pytorch_model.bin")])
def test_several_threads_read_ahead_when_the_loader_is_told_to(
    checkpoint: Path, reads: Reads, load_format: str, name: str
):
    def load(**options: Any) -> None:
        opened(checkpoint, load_format=load_format, model_loader_extra_config=options)

    load(enable_multithread_load=False)
    assert reads == []
    load(enable_multithread_load=True)
    load(enable_multithread_load=True, num_threads=2)
    assert [(names, threads) for names, threads, _ in reads] == [([name], 8), ([name], 2)]


def test_files_that_match_an_ignored_pattern_are_not_seen(checkpoint: Path):
    assert isinstance(opened(checkpoint, ignore_patterns=["*.safetensors"]), TorchCheckpoint)
    with pytest.raises(ModelLoadError, match="no weight files"):
        opened(checkpoint, ignore_patterns=["*.safetensors", "*.bin"])


def test_a_map_location_reaches_torch(checkpoint: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []
    original = torch.load
    monkeypatch.setattr(
        torch, "load", lambda path, **how: [asked.append(how["map_location"]), original(path, **how)][1]
    )
    where = {"cuda:0": "cpu"}
    found = opened(checkpoint, load_format="pt", pt_load_map_location=where)
    assert [tensor.name for tensor in found.tensors()] == ["a"]
    assert asked == [where]


def test_a_class_of_ones_own_may_stand_for_an_architecture(tmp_path: Path):
    from tests.models.harness import CPU, config_for
    from vllm_clone.models.llama import LlamaForCausalLM

    config = config_for(tmp_path, save(build(VARIANTS["llama"]), tmp_path))
    model = dataclasses.replace(config.model_config, model_class_overrides={"LlamaForCausalLM": f"{__name__}:Mine"})
    made = loader.load_model(dataclasses.replace(config, model_config=model), CPU)
    assert type(made) is Mine
    assert issubclass(Mine, LlamaForCausalLM)


def _mine() -> type:
    from vllm_clone.models.llama import LlamaForCausalLM

    return type("Mine", (LlamaForCausalLM,), {})


Mine = _mine()
