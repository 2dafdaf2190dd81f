"""Every file layout of a Hugging Face checkpoint loads, and gives the same weights."""

import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from tests.models.families import VARIANTS, build, save
from tests.models.harness import config_for, load
from vllm_clone.model_loader.checkpoint import CheckpointTensor, SafetensorsCheckpoint, find_files
from vllm_clone.model_loader.loader import load_model, load_weights


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return build(VARIANTS["llama"])


def assert_equals(model: torch.nn.Module, reference: PreTrainedModel, dtype: torch.dtype = torch.float32) -> None:
    expected = {name: p.to(dtype) for name, p in reference.named_parameters()}
    for i, layer in enumerate(model.model.layers):
        prefix = f"model.layers.{i}"
        for x, part in zip("qkv", layer.self_attn.qkv_proj.matrix().split([64, 32, 32]), strict=True):
            assert torch.equal(part, expected[f"{prefix}.self_attn.{x}_proj.weight"])
        assert torch.equal(layer.mlp.gate_up_proj.matrix()[80:], expected[f"{prefix}.mlp.up_proj.weight"])
        assert torch.equal(layer.mlp_norm.weight, expected[f"{prefix}.post_attention_layernorm.weight"])
    assert torch.equal(model.lm_head.matrix(), expected["lm_head.weight"])


def test_single_safetensors(reference: PreTrainedModel, tmp_path: Path) -> None:
    assert_equals(load(tmp_path, save(reference, tmp_path)), reference)


def test_sharded_safetensors(reference: PreTrainedModel, tmp_path: Path) -> None:
    config = save(reference, tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*-of-*.safetensors"))) > 2
    assert_equals(load(tmp_path, config), reference)


def test_shards_without_an_index(reference: PreTrainedModel, tmp_path: Path) -> None:
    config = save(reference, tmp_path, max_shard_size="100KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    assert_equals(load(tmp_path, config), reference)


def test_other_safetensors_files_are_left_alone(reference: PreTrainedModel, tmp_path: Path) -> None:
    config = save(reference, tmp_path)
    save_file({"junk": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    save_file({"junk": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    assert_equals(load(tmp_path, config), reference)


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old-format"])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pt"])
def test_torch_file(zipped: bool, name: str, reference: PreTrainedModel, tmp_path: Path) -> None:
    config = save(reference, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(reference.state_dict(), tmp_path / name, _use_new_zipfile_serialization=zipped)
    assert_equals(load(tmp_path, config), reference)


def test_torch_file_with_the_weights_under_state_dict(reference: PreTrainedModel, tmp_path: Path) -> None:
    config = save(reference, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"state_dict": reference.state_dict(), "step": 3}, tmp_path / "pytorch_model.bin")
    assert_equals(load(tmp_path, config), reference)


def test_load_format_chooses_among_files(reference: PreTrainedModel, tmp_path: Path) -> None:
    config = save(reference, tmp_path)
    save_file({"junk": torch.zeros(1)}, tmp_path / "model.safetensors")
    torch.save(reference.state_dict(), tmp_path / "pytorch_model.bin")
    assert_equals(load(tmp_path, config, load_format="pt"), reference)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_are_converted_to_the_models_dtype(dtype: str, reference: PreTrainedModel, tmp_path: Path) -> None:
    model = load(tmp_path, save(reference, tmp_path), dtype=dtype)
    assert_equals(model, reference, getattr(torch, dtype))
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}


def test_known_buffers_of_old_checkpoints_are_ignored(reference: PreTrainedModel, tmp_path: Path) -> None:
    config = save(reference, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_equals(load(tmp_path, config), reference)


def test_head_in_a_tied_checkpoint_is_ignored(tmp_path: Path) -> None:
    reference = build(VARIANTS["llama-tied"])
    config = save(reference, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.zeros(131, 48)}, tmp_path / "model.safetensors")
    model = load(tmp_path, config)
    assert model.lm_head is model.model.embed_tokens
    assert torch.equal(model.lm_head.matrix(), reference.model.embed_tokens.weight)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2_checkpoints_come_with_and_without_prefix(prefix: str, tmp_path: Path) -> None:
    reference = build(VARIANTS["gpt2"])
    config = save(reference, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {prefix + name.removeprefix("transformer."): value for name, value in tensors.items()}
    tensors[f"{prefix}h.0.attn.bias"] = torch.zeros(1, 1, 128, 128)
    tensors[f"{prefix}h.0.attn.masked_bias"] = torch.zeros(())
    save_file(tensors, tmp_path / "model.safetensors")
    model = load(tmp_path, config)
    assert torch.equal(model.transformer.h[1].mlp.c_fc.matrix(), reference.transformer.h[1].mlp.c_fc.weight.t())


def test_dummy_weights_are_the_same_every_time_and_need_no_files(tmp_path: Path) -> None:
    config: dict[str, Any] = {**VARIANTS["llama"].config, "architectures": ["LlamaForCausalLM"]}
    first, second = (load(tmp_path, config, load_format="dummy") for _ in range(2))
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.isfinite().all()
    layers = first.model.layers
    assert not torch.equal(layers[0].mlp.down_proj.matrix(), layers[1].mlp.down_proj.matrix())


def test_reading_one_tensor_maps_the_file_and_copies_nothing_else(reference: PreTrainedModel, tmp_path: Path) -> None:
    save(reference, tmp_path, max_shard_size="100KB")
    files = find_files(tmp_path, "model", "safetensors")
    stream = SafetensorsCheckpoint(files).tensors()
    first = next(stream)
    files[-1].unlink()  # not opened before its turn
    assert first.nbytes == first.read().nbytes
    stream.close()


def test_each_tensor_is_released_before_the_next_is_read(reference: PreTrainedModel, tmp_path: Path) -> None:
    config = save(reference, tmp_path)
    alive: list[weakref.ref[torch.Tensor]] = []

    class Watched(SafetensorsCheckpoint):
        def tensors(self) -> Iterator[CheckpointTensor]:
            for tensor in super().tensors():
                assert all(ref() is None for ref in alive)

                def read(original: CheckpointTensor = tensor) -> torch.Tensor:
                    data = original.read()
                    alive.append(weakref.ref(data))
                    return data

                yield replace(tensor, read=read)

    model = load(tmp_path, config, load_format="dummy")
    load_weights(model, Watched(find_files(tmp_path, "model", "safetensors")), show_progress=False)
    assert len(alive) == len(reference.state_dict())
    assert_equals(model, reference)


def test_progress_goes_to_stderr(reference: PreTrainedModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = config_for(tmp_path, save(reference, tmp_path))
    capfd.readouterr()
    config.load_config.use_tqdm_on_load = True
    load_model(config, torch.device("cpu"))
    captured = capfd.readouterr()
    assert "Loading weights: 100%" in captured.err
    assert "%|" not in captured.out
