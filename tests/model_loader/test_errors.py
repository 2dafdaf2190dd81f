"""Whatever is wrong with a checkpoint is told in one line: the file, the tensor, what was expected and found."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.families import VARIANTS, build, save
from tests.models.harness import load
from vllm_clone.errors import ModelLoadError


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    return tmp_path, save(build(VARIANTS["llama"]), tmp_path)


def change(path: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (with None) remove tensors of the checkpoint; ``__`` stands for a dot."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for key, value in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, file)


def message(path: Path, config: dict[str, Any], **options: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(path, config, **options)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_missing_tensor(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    change(checkpoint[0], model__layers__1__self_attn__k_proj__weight=None)
    text = message(*checkpoint)
    assert "model.safetensors" in text
    assert "1 tensors are missing: model.layers.1.self_attn.k_proj.weight" in text


def test_unexpected_shape(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    change(checkpoint[0], model__layers__1__mlp__up_proj__weight=torch.zeros(81, 48))
    assert message(*checkpoint) == (
        "model.safetensors: tensor model.layers.1.mlp.up_proj.weight: expected shape [80, 48], found [81, 48]"
    )


def test_unexpected_vocabulary(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    path, config = checkpoint
    text = message(path, {**config, "vocab_size": 140})
    assert "expected shape [140, 48], found [131, 48]" in text


def test_integer_weights(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    change(checkpoint[0], model__norm__weight=torch.zeros(48, dtype=torch.int8))
    assert message(*checkpoint) == (
        "model.safetensors: tensor model.norm.weight: expected a plain floating-point dtype, found int8"
    )


def test_unknown_tensor(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    change(checkpoint[0], model__extra__weight=torch.zeros(3))
    assert message(*checkpoint) == "model.safetensors: tensor model.extra.weight: the model has no such tensor"


def test_bias_that_the_config_does_not_ask_for(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    change(checkpoint[0], model__layers__0__self_attn__q_proj__bias=torch.zeros(64))
    text = message(*checkpoint)
    assert text.startswith("model.safetensors: tensor model.layers.0.self_attn.q_proj.bias: the model has no 'bias'")


def test_more_layers_than_the_config_has(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    path, config = checkpoint
    text = message(path, {**config, "num_hidden_layers": 2})
    assert "tensor model.layers.2." in text
    assert "no such tensor" in text


def test_truncated_safetensors(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    file = checkpoint[0] / "model.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as handle:
        handle.truncate(size - 1000)
    assert message(*checkpoint) == (
        f"{file}: truncated file: expected {size} bytes, found {size - 1000}; download it again"
    )


@pytest.mark.parametrize("size", [0, 4, 20])
def test_truncated_safetensors_header(size: int, checkpoint: tuple[Path, dict[str, Any]]) -> None:
    file = checkpoint[0] / "model.safetensors"
    with file.open("r+b") as handle:
        handle.truncate(size)
    assert message(*checkpoint).startswith(f"{file}: not a readable safetensors file of {size} bytes")


def test_safetensors_file_that_is_none(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    file = checkpoint[0] / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\n" * 3)
    assert message(*checkpoint).startswith(f"{file}: not a readable safetensors file")


def test_missing_shard(tmp_path: Path) -> None:
    config = save(build(VARIANTS["llama"]), tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    text = message(tmp_path, config)
    assert text.startswith("model.safetensors.index.json names ")
    assert f"missing: {shard.name} in {tmp_path}" in text


def test_broken_index(tmp_path: Path) -> None:
    config = save(build(VARIANTS["llama"]), tmp_path, max_shard_size="100KB")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weights": {}}))
    assert message(tmp_path, config).startswith(f"{index}: not a shard index with a weight_map")


def test_no_weights_at_all(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    path, config = checkpoint
    (path / "model.safetensors").unlink()
    text = message(path, config)
    assert text.startswith(f"{path}: no weight files; looked for model*.safetensors, pytorch_model*.bin")
    assert "found config.json" in text


def test_wrong_load_format_says_what_was_looked_for(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    assert "looked for pytorch_model*.bin or *.pt; found" in message(*checkpoint, load_format="pt")


def test_missing_directory(tmp_path: Path) -> None:
    config = {**VARIANTS["llama"].config, "architectures": ["LlamaForCausalLM"]}
    assert message(tmp_path / "gone", config) == f"{tmp_path / 'gone'}: no such file or directory"


class Evil:
    """Unpickling this would run code."""

    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('code ran')",))


@pytest.mark.parametrize("content", ["evil", "truncated", "text", "list"])
def test_torch_file_that_cannot_be_trusted_or_read(content: str, checkpoint: tuple[Path, dict[str, Any]]) -> None:
    path, config = checkpoint
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    file = path / "pytorch_model.bin"
    torch.save({"evil": {"model.norm.weight": Evil()}, "list": [1, 2]}.get(content, tensors), file)
    if content == "truncated":
        with file.open("r+b") as handle:
            handle.truncate(file.stat().st_size // 2)
    if content == "text":
        file.write_text("not found")
    assert message(path, config).startswith(f"{file}: ")


def test_unknown_architecture_lists_the_known_ones(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    path, config = checkpoint
    text = message(path, {**config, "architectures": ["MambaForCausalLM"]})
    assert text.startswith("unknown architecture 'MambaForCausalLM'; known architectures: GPT2LMHeadModel, ")
    assert "LlamaForCausalLM" in text


def test_refused_architecture_gives_the_reason(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    path, config = checkpoint
    text = message(path, {**config, "architectures": ["Gemma3ForConditionalGeneration"]})
    assert "image part is not supported" in text


def test_quantized_checkpoint(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    path, config = checkpoint
    text = message(path, {**config, "quantization_config": {"quant_method": "awq"}})
    assert text == f"{path}: quantized checkpoints are not supported yet (quant_method 'awq')"


@pytest.mark.parametrize(
    ("change_to", "expected"),
    [
        ({"hidden_size": None}, "config.json: field 'hidden_size' is missing"),
        ({"hidden_size": "48"}, "config.json: field 'hidden_size' must be int, found '48'"),
        ({"num_key_value_heads": 3}, "config.json: 4 attention heads cannot share 3 key-value heads"),
        ({"hidden_act": "mish"}, "unknown activation 'mish'; known: silu"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "unknown rope type 'spiral'; known types: default, linear"),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "rope type 'linear' needs a number 'factor' in rope_parameters, found None",
        ),
    ],
)
def test_config_that_cannot_be_served(
    change_to: dict[str, Any], expected: str, checkpoint: tuple[Path, dict[str, Any]]
) -> None:
    path, config = checkpoint
    assert message(path, {**config, **change_to}).startswith(expected)


def test_gemma_that_reads_both_ways(checkpoint: tuple[Path, dict[str, Any]]) -> None:
    path, config = checkpoint
    config = {**config, "architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}
    assert "use_bidirectional_attention is set" in message(path, config)
