"""Rotary tables equal those of transformers for every rope type, also when only part of a head rotates."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from vllm_clone.errors import ModelLoadError
from vllm_clone.layers.rotary import RopeConfig, RotaryEmbedding, cos_sin_table
from vllm_clone.models.config import read_rope

CASES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("kind", CASES)
def test_table_equals_transformers(kind: str, fraction: float) -> None:
    parameters = {"rope_type": kind, "rope_theta": 5000.0, "partial_rotary_factor": fraction, **CASES[kind]}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=2, max_position_embeddings=256, rope_parameters=dict(parameters)
    )
    # The server's dynamic table is made for the longest sequence the factor allows.
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, seq_len=512)
    angles = torch.outer(torch.arange(512, dtype=torch.float32), frequencies)
    expected = torch.cat((angles.cos(), angles.sin()), -1) * scale
    rope = read_rope({"max_position_embeddings": 256, "rope_parameters": parameters}, 32)
    table = cos_sin_table(rope, 512)
    assert table.dtype == torch.float32
    assert rope.dim == 32 * fraction
    torch.testing.assert_close(table, expected, atol=2e-5, rtol=0)


def test_yarn_takes_a_given_attention_factor() -> None:
    parameters = {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5}
    rope = RopeConfig(16, rope_type="yarn", parameters=parameters)
    assert cos_sin_table(rope, 1)[0, 0] == 1.5


def test_elements_beyond_the_rotary_dimension_are_left_alone() -> None:
    rope = RotaryEmbedding(RopeConfig(16, rotary_dim=8), 32, torch.device("cpu"))
    q, k = torch.randn(3, 4 * 16), torch.randn(3, 2 * 16)
    before = q.clone().view(3, 4, 16)
    rope(torch.tensor([0, 5, 31]), q, k)
    after = q.view(3, 4, 16)
    assert torch.equal(after[..., 8:], before[..., 8:])
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1, :, :8], before[1, :, :8])


def test_scores_depend_on_the_distance_of_positions_alone() -> None:
    rope = RotaryEmbedding(RopeConfig(16), 64, torch.device("cpu"))
    q, k = torch.randn(1, 16).repeat(2, 1), torch.randn(1, 16).repeat(2, 1)
    rope(torch.tensor([10, 57]), q, torch.zeros(2, 16))
    rope(torch.tensor([3, 50]), k, torch.zeros(2, 16))
    torch.testing.assert_close(q[0] @ k[0], q[1] @ k[1])


def test_strided_views_of_one_projection_are_rotated_in_place() -> None:
    rope = RotaryEmbedding(RopeConfig(8), 32, torch.device("cpu"))
    qkv = torch.randn(3, 4 * 8)
    q, k, v = qkv.split([16, 8, 8], -1)
    expected_q, expected_k, before_v = q.clone(), k.clone(), v.clone()
    positions = torch.tensor([1, 2, 3])
    rope(positions, expected_q, expected_k)
    rope(positions, q, k)
    assert torch.equal(qkv, torch.cat((expected_q, expected_k, before_v), -1))


def test_unknown_type_lists_the_known_ones() -> None:
    with pytest.raises(ModelLoadError, match="unknown rope type 'spiral'; known types: default, linear, dynamic"):
        cos_sin_table(RopeConfig(16, rope_type="spiral"), 4)


def test_frequency_factors_must_match_the_head() -> None:
    with pytest.raises(ModelLoadError, match="expected 8 rope frequency factors, found 3"):
        cos_sin_table(RopeConfig(16, freq_factors=(1.0, 1.0, 2.0)), 4)


def test_settings_keyed_by_layer_type() -> None:
    hf = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 2, "rope_theta": 9.0},
            "sliding_attention": {"rope_theta": 5},
        }
    }
    full = read_rope(hf, 16, layer_type="full_attention")
    local = read_rope(hf, 16, layer_type="sliding_attention")
    assert (full.rope_type, full.theta, full.number("factor")) == ("linear", 9.0, 2.0)
    assert (local.rope_type, local.theta) == ("default", 5.0)
