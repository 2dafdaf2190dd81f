"""Our logits equal transformers' for every family, however the prompt is cut into steps."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.conftest import Example
from tests.models.families import VARIANTS, Variant, build, expected_logits, save
from tests.models.harness import PagedModel, load
from vllm_clone.attention import ForwardContext

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("chunk", [0, 7, 1], ids=["whole", "chunks-of-7", "token-by-token"])
@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
def test_logits_equal_transformers(name: str, recorded: bool, chunk: int, example: Callable[[str], Example]) -> None:
    expected = example(name)
    model = load(expected.path, expected.hf_config)
    logits = PagedModel(model, recorded=recorded).logits(expected.tokens, chunk=chunk)
    assert logits.dtype == torch.float32
    assert (logits - expected.logits).abs().max() < TOLERANCE


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "gemma3", "gpt2"])
def test_rows_of_a_mixed_step_do_not_see_each_other(
    name: str, recorded: bool, example: Callable[[str], Example]
) -> None:
    expected = example(name)
    tokens = expected.tokens
    paged = PagedModel(load(expected.path, expected.hf_config), recorded=recorded)
    paged.step({"decoding": tokens[:30], "chunked": tokens[:5]})
    out = paged.step({"decoding": tokens[30:31], "new": tokens[:12], "chunked": tokens[5:20]})
    assert (out["decoding"] - expected.logits[30:31]).abs().max() < TOLERANCE
    assert (out["new"] - expected.logits[:12]).abs().max() < TOLERANCE
    assert (out["chunked"] - expected.logits[5:20]).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window", "gemma2", "gemma3"])
def test_prompts_reach_beyond_the_window(name: str, example: Callable[[str], Example]) -> None:
    expected = example(name)
    model = load(expected.path, expected.hf_config)
    windows = {layer.sliding_window for layer in model.attention_layers().values()} - {0}
    assert windows
    assert len(expected.tokens) > 3 * max(windows)
    without = load(expected.path, {**expected.hf_config, "sliding_window": 10_000})
    assert (PagedModel(without).logits(expected.tokens) - expected.logits).abs().max() > 0.01


def test_layers_of_one_kind_share_the_rotary_table(example: Callable[[str], Example]) -> None:
    model = load(example("gemma3").path, example("gemma3").hf_config)
    tables = {id(layer.self_attn.rope) for layer in model.model.layers}
    assert len(tables) == 2


def test_padding_tokens_after_the_actual_ones_change_nothing(example: Callable[[str], Example]) -> None:
    expected = example("llama")
    paged = PagedModel(load(expected.path, expected.hf_config))
    tokens = expected.tokens[:9]
    paged.tables["a"], paged.lengths["a"] = [3, 5], 9
    slots = [3 * 8 + i for i in range(8)] + [5 * 8]
    metadata = replace(paged.metadata(["a"], [0, 9], slots), slot_mapping_T=torch.tensor([*slots, -1, -1, -1]))
    ctx = ForwardContext(dict.fromkeys(paged.layers, metadata))
    ids, positions = torch.tensor([*tokens, 0, 0, 0]), torch.tensor([*range(9), 0, 0, 0])
    with torch.inference_mode():
        hidden = paged.model(ids, positions, ctx)[:9]
        assert (paged.model.compute_logits(hidden) - expected.logits[:9]).abs().max() < TOLERANCE


OLD_STYLE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "rope_theta": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_parameters": None, "rope_theta": 500.0},
    ),
    "rope_scaling-type": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
        {"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4}},
    ),
    "rope_scaling-llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {
            "rope_parameters": None,
            "rope_theta": 500,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "gemma3-local-base": (
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 777.0},
            },
        },
        {
            "layer_types": None,
            "sliding_window_pattern": 6,
            "rope_parameters": None,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 777.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
}


@pytest.mark.parametrize("style", OLD_STYLE)
def test_older_spellings_of_rope_settings_mean_the_same(style: str, tmp_path: Path) -> None:
    model_type, new, old = OLD_STYLE[style]
    reference = build(Variant(model_type, new))
    hf_config = save(reference, tmp_path)
    tokens = list(range(5, 45))
    logits = PagedModel(load(tmp_path, {**hf_config, **old})).logits(tokens)
    assert (logits - expected_logits(reference, tokens)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "gpt2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(name: str, dtype: str, example: Callable[[str], Example]) -> None:
    expected = example(name)
    logits = PagedModel(load(expected.path, expected.hf_config, dtype=dtype)).logits(expected.tokens, chunk=7)
    error = (logits - expected.logits).abs()
    assert logits.dtype == torch.float32
    assert error.mean() < (0.02 if dtype == "bfloat16" else 0.003)


@pytest.mark.parametrize("name", ["mistral-window", "gemma3"])
def test_blocks_that_left_the_window_are_never_read(name: str, example: Callable[[str], Example]) -> None:
    expected = example(name)
    paged = PagedModel(load(expected.path, expected.hf_config), block_size=4)
    sliding = {n: layer.sliding_window for n, layer in paged.layers.items() if layer.sliding_window}
    paged.step({"a": expected.tokens[:40]})
    paged.tables["a"].append(paged.free.pop())
    paged.lengths["a"] = 41
    full = paged.metadata(["a"], [0, 1], [paged.tables["a"][10] * 4])
    # What the engine's table looks like once it has given old blocks away: the null block, which is all NaN here.
    table = full.block_table_RB.clone()
    table[:, : (41 - max(sliding.values())) // 4] = 0
    windowed = replace(full, block_table_RB=table)
    ctx = ForwardContext({n: windowed if n in sliding else full for n in paged.layers})
    with torch.inference_mode():
        logits = paged.model.compute_logits(paged.model(torch.tensor(expected.tokens[40:41]), torch.tensor([40]), ctx))
    assert (logits - expected.logits[40]).abs().max() < TOLERANCE
