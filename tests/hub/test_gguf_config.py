"""GGUF metadata as config.json and generation_config.json; transformers is the judge."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.hub.gguf_bytes import ARRAY, F32, LLAMA, STRING, U32, gguf_bytes, smollm2, tensor
from vllm_clone.errors import ConfigError
from vllm_clone.hub import ModelFiles, load_generation_config, load_hf_config


def config(tmp_path: Path, metadata: dict[str, tuple[int, Any]], tensors: tuple[str, ...] = ()) -> dict[str, Any]:
    return load_hf_config(model(tmp_path, metadata, tensors))


def model(tmp_path: Path, metadata: dict[str, tuple[int, Any]], tensors: tuple[str, ...] = ()) -> ModelFiles:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(metadata, tuple(tensor(name, (1,)) for name in tensors), bytes(64)))
    return ModelFiles(path, "gguf")


def family(arch: str, **more: tuple[int, Any]) -> dict[str, tuple[int, Any]]:
    """The Llama metadata under another architecture's name; ``a__b`` in a keyword stands for ``a.b``."""
    renamed = {k.replace("llama.", f"{arch}.", 1): v for k, v in LLAMA.items()}
    extra = {f"{arch}.{k.replace('__', '.')}": v for k, v in more.items()}
    return renamed | {"general.architecture": (STRING, arch)} | extra


def same_as_transformers(path: Path, ours: dict[str, Any], *, but: tuple[str, ...] = ()) -> None:
    theirs = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    for key, value in ours.items():
        if key in but or key == "architectures":
            continue
        expected = getattr(theirs, key)
        assert value == (expected if not hasattr(expected, "to_dict") else expected.to_dict()), key


def test_the_real_file_says_what_transformers_reads_from_it() -> None:
    ours = load_hf_config(ModelFiles(smollm2(), "gguf"))
    assert ours["architectures"] == ["LlamaForCausalLM"]
    assert ours["tie_word_embeddings"] is True
    same_as_transformers(smollm2(), ours)


def test_the_real_file_ends_answers_with_its_eos_alone() -> None:
    assert load_generation_config(ModelFiles(smollm2(), "gguf")) == {"eos_token_id": [2]}


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_the_fields_of_a_family_are_those_of_transformers(tmp_path: Path, arch: str) -> None:
    more: dict[str, tuple[int, Any]] = {"rope__freq_base": (F32, 5000.0), "attention__head_count_kv": (U32, 2)}
    if arch.startswith("gemma"):
        more |= {"attention__sliding_window": (U32, 16), "attention__key_length": (U32, 8)}
    ours = config(tmp_path, family(arch, **more), ("output.weight",))
    differs = {
        # What transformers takes from its defaults because it does not read the key.
        "gemma2": ("query_pre_attn_scalar", "tie_word_embeddings", "rope_parameters"),
        "gemma3": ("query_pre_attn_scalar", "tie_word_embeddings", "rope_parameters"),
        "qwen3": ("head_dim",),
        "qwen2": ("head_dim", "attention_bias"),
    }
    same_as_transformers(
        tmp_path / "m.gguf", ours, but=(*differs.get(arch, ()), "bos_token_id", "eos_token_id", "pad_token_id")
    )


def test_gpt2_keeps_its_own_names(tmp_path: Path) -> None:
    ours = config(
        tmp_path, family("gpt2", attention__layer_norm_epsilon=(F32, 0.5), attention__head_count=(U32, 4)), ()
    )
    assert (ours["n_embd"], ours["n_layer"], ours["n_head"], ours["n_positions"]) == (32, 2, 4, 128)
    assert (ours["n_inner"], ours["layer_norm_epsilon"], ours["activation_function"]) == (64, 0.5, "gelu_new")
    assert ours["tie_word_embeddings"] is True


def test_embeddings_are_tied_when_there_is_no_output_tensor(tmp_path: Path) -> None:
    assert config(tmp_path, LLAMA)["tie_word_embeddings"] is True
    assert config(tmp_path, LLAMA, ("output.weight",))["tie_word_embeddings"] is False


def test_the_embedding_decides_the_vocabulary_size(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(LLAMA, (tensor("token_embd.weight", (1, 12)),), bytes(64)))
    assert load_hf_config(ModelFiles(path, "gguf"))["vocab_size"] == 12
    assert config(tmp_path, LLAMA)["vocab_size"] == 10


def test_heads_share_nothing_and_split_the_width_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    assert (config(tmp_path, LLAMA)["num_key_value_heads"], config(tmp_path, LLAMA)["head_dim"]) == (4, 8)
    wide = config(tmp_path, family("llama", attention__key_length=(U32, 16), attention__head_count_kv=(U32, 1)))
    assert (wide["num_key_value_heads"], wide["head_dim"]) == (1, 16)


def test_special_token_ids_are_carried_over(tmp_path: Path) -> None:
    ids = {f"tokenizer.ggml.{k}_token_id": (U32, n) for n, k in enumerate(("bos", "eos", "padding"), 5)}
    ours = config(tmp_path, LLAMA | ids)
    assert (ours["bos_token_id"], ours["eos_token_id"], ours["pad_token_id"]) == (5, 6, 7)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope__freq_base": (F32, 500.0)}, {"rope_type": "default", "rope_theta": 500.0}),
        (
            {"rope__scaling__type": (STRING, "none"), "rope__scaling__factor": (F32, 4.0)},
            {"rope_type": "default", "rope_theta": 10000.0},
        ),
        (
            {"rope__scaling__type": (STRING, "linear"), "rope__scaling__factor": (F32, 4.0)},
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        ),
        ({"rope__scale_linear": (F32, 2.0)}, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
        (
            {
                "rope__scaling__type": (STRING, "yarn"),
                "rope__scaling__factor": (F32, 4.0),
                "rope__scaling__original_context_length": (U32, 64),
            },
            {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
)
def test_rope_scaling(tmp_path: Path, keys: dict[str, tuple[int, Any]], expected: dict[str, Any]) -> None:
    assert config(tmp_path, family("llama", **keys))["rope_parameters"] == expected


def test_gemma2_alternates_windows_and_caps_scores(tmp_path: Path) -> None:
    keys = {"attention__sliding_window": (U32, 64), "attn_logit_softcapping": (F32, 25.0), "block_count": (U32, 4)}
    ours = config(tmp_path, family("gemma2", **keys))
    assert ours["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert (ours["sliding_window"], ours["attn_logit_softcapping"], ours["final_logit_softcapping"]) == (64, 25.0, 30.0)


def test_gemma3_has_one_rope_for_windows_and_one_for_all(tmp_path: Path) -> None:
    keys = {"block_count": (U32, 12), "rope__scaling__type": (STRING, "linear"), "rope__scaling__factor": (F32, 8.0)}
    ours = config(tmp_path, family("gemma3", **keys))
    assert ours["layer_types"] == (["sliding_attention"] * 5 + ["full_attention"]) * 2
    assert ours["rope_parameters"] == {
        "full_attention": {"rope_theta": 1_000_000.0, "rope_type": "linear", "factor": 8.0},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }


@pytest.mark.parametrize(("arch", "layers", "scalar"), [("gemma2", 46, 8), ("gemma2", 42, 16), ("gemma3", 62, 8)])
def test_the_largest_gemmas_scale_scores_by_width(tmp_path: Path, arch: str, layers: int, scalar: int) -> None:
    keys = {"block_count": (U32, layers), "attention__key_length": (U32, 16)}
    assert config(tmp_path, family(arch, **keys))["query_pre_attn_scalar"] == scalar


# ---- generation ----


def test_every_end_of_turn_token_ends_an_answer(tmp_path: Path) -> None:
    tokens = {
        "tokenizer.ggml.eos_token_id": (U32, 0),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, ["<eos>", "a", "<end_of_turn>"])),
    }
    assert load_generation_config(model(tmp_path, LLAMA | tokens)) == {"eos_token_id": [0, 2]}
    named = tokens | {"tokenizer.ggml.eot_token_id": (U32, 1)}
    assert load_generation_config(model(tmp_path, LLAMA | named)) == {"eos_token_id": [0, 1, 2]}


def test_advised_sampling_becomes_a_default(tmp_path: Path) -> None:
    advice = {"general.sampling.temp": (F32, 0.5), "general.sampling.top_k": (U32, 20)}
    assert load_generation_config(model(tmp_path, LLAMA | advice)) == {"temperature": 0.5, "top_k": 20}


# ---- refusals ----


def test_an_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"m\.gguf: GGUF architecture 'rwkv' is not supported; known are llama, "):
        config(tmp_path, LLAMA | {"general.architecture": (STRING, "rwkv")})


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    without = {k: v for k, v in LLAMA.items() if k != "llama.block_count"}
    with pytest.raises(ConfigError, match=r"m\.gguf: the metadata key llama\.block_count is missing"):
        config(tmp_path, without)


def test_a_part_of_a_split_file_says_how_to_join(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is one of 3 parts; join them first"):
        config(tmp_path, LLAMA | {"split.count": (U32, 3)})


def test_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="mixture-of-experts models of the architecture llama"):
        config(tmp_path, family("llama", expert_count=(U32, 8)))


def test_sizes_that_differ_by_layer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"llama\.attention\.head_count_kv differs by layer"):
        config(tmp_path, family("llama", attention__head_count_kv=(ARRAY, (U32, [4, 2]))))
