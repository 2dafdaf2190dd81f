"""The attention layer's cache spec and its choice of a backend."""

import pytest
import torch

from vllm_clone.attention import get_attention_backend
from vllm_clone.config.kv_cache import KV_DTYPES, FullAttentionSpec, SlidingWindowSpec
from vllm_clone.errors import ConfigError
from vllm_clone.layers.attention import Attention
from vllm_clone.layers.linear import UnquantizedLinearMethod
from vllm_clone.layers.options import BuildOptions

OPTIONS = BuildOptions(torch.bfloat16, torch.device("cpu"), UnquantizedLinearMethod(), max_positions=8)


def layer(window: int = 0) -> Attention:
    return Attention(6, 16, 0.25, 2, layer_name="a", options=OPTIONS, sliding_window=window)


def test_full_attention_spec() -> None:
    assert layer().kv_cache_spec(32, "bfloat16") == FullAttentionSpec(32, 2, 16, "bfloat16")


def test_sliding_window_spec() -> None:
    assert layer(9).kv_cache_spec(32, "bfloat16") == SlidingWindowSpec(32, 2, 16, "bfloat16", 9)


@pytest.mark.parametrize("name", KV_DTYPES)
def test_every_storage_type_has_a_page_that_fits(name: str) -> None:
    spec = layer().kv_cache_spec(32, name)
    shape = layer().backend.kv_cache_shape(5, spec)
    dtype = getattr(torch, KV_DTYPES[name].torch_name)
    assert torch.empty(shape, dtype=dtype).nbytes == 5 * spec.page_size_bytes


def test_a_cache_that_cannot_be_kept_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="CPU_ATTN cannot keep this KV cache: it stores float32.*, not nvfp4"):
        layer().kv_cache_spec(32, "nvfp4")
    with pytest.raises(ConfigError, match="heads must have an even size up to 512, not 15"):
        Attention(6, 15, 0.25, 2, layer_name="a", options=OPTIONS)


def test_platform_without_a_backend_is_refused_with_every_reason() -> None:
    spec = FullAttentionSpec(16, 2, 16, "bfloat16")
    with pytest.raises(ConfigError, match=r"no attention backend for .*CPU_ATTN: it runs on the CPU, not on cuda"):
        get_attention_backend("cuda", spec, torch.bfloat16)


def test_backend_by_name() -> None:
    spec = FullAttentionSpec(16, 2, 16, "bfloat16")
    assert get_attention_backend("cpu", spec, torch.bfloat16, "cpu_attn").name == "CPU_ATTN"
    with pytest.raises(ConfigError, match="unknown attention backend 'FLASH'; known backends: CPU_ATTN"):
        get_attention_backend("cpu", spec, torch.bfloat16, "FLASH")
