"""Norms and activations agree with torch's own definitions."""

import pytest
import torch
import torch.nn.functional as F

from vllm_clone.errors import ModelLoadError
from vllm_clone.layers.activation import activation, gated_activation
from vllm_clone.layers.embedding import softcap_
from vllm_clone.layers.linear import UnquantizedLinearMethod
from vllm_clone.layers.norm import LayerNorm, RMSNorm
from vllm_clone.layers.options import BuildOptions

OPTIONS = BuildOptions(torch.float32, torch.device("cpu"), UnquantizedLinearMethod(), max_positions=8)


def rms_norm(offset: float = 0.0) -> tuple[RMSNorm, torch.Tensor]:
    norm = RMSNorm(16, 1e-5, OPTIONS, offset)
    weight = torch.randn(16)
    norm.load_weight("weight", weight)
    return norm, weight


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(offset: float) -> None:
    norm, weight = rms_norm(offset)
    x = torch.randn(5, 16)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (16,), weight + offset, 1e-5))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_fused_add_updates_the_residual_stream(offset: float) -> None:
    norm, weight = rms_norm(offset)
    x, residual = torch.randn(5, 16), torch.randn(5, 16)
    total = x + residual
    out = norm.add(x, residual)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(out, F.rms_norm(total, (16,), weight + offset, 1e-5))


def test_heads_are_normalised_one_by_one_also_in_a_strided_view() -> None:
    norm, weight = rms_norm()
    qkv = torch.randn(3, 5 * 16)
    q = qkv[:, :48]
    expected = F.rms_norm(q.reshape(3, 3, 16), (16,), weight, 1e-5).reshape(3, 48)
    norm.heads_(q)
    torch.testing.assert_close(q, expected)


def test_layer_norm() -> None:
    norm = LayerNorm(16, 1e-5, OPTIONS)
    weight, bias, x = torch.randn(16), torch.randn(16), torch.randn(5, 16)
    norm.load_weight("weight", weight)
    norm.load_weight("bias", bias)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (16,), weight, bias, 1e-5))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", F.silu),
        ("gelu", F.gelu),
        ("gelu_new", lambda x: F.gelu(x, approximate="tanh")),
        ("gelu_pytorch_tanh", lambda x: F.gelu(x, approximate="tanh")),
    ],
)
def test_activations_by_their_name_in_config_json(name: str, function: object) -> None:
    assert callable(function)
    x = torch.randn(4, 32)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(gated_activation(name)(x), function(gate) * up)
    torch.testing.assert_close(activation(name)(x), function(x))


def test_unknown_activation_lists_the_known_ones() -> None:
    with pytest.raises(ModelLoadError, match="unknown activation 'mish'; known: silu, swish, gelu"):
        gated_activation("mish")


def test_softcap_bounds_logits_and_zero_means_none() -> None:
    logits = torch.tensor([[-1000.0, 0.0, 3.0]])
    torch.testing.assert_close(softcap_(logits.clone(), 30.0), 30 * torch.tanh(logits / 30))
    assert torch.equal(softcap_(logits.clone(), 0.0), logits)
