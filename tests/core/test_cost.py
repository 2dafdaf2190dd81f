"""--enable-mfu-metrics: operations and bytes of a step, against counts by hand."""

import pytest

from tests.core.test_engine_core import request
from tests.engine.fakes import FakeExecutor, fake_config
from vllm_clone.config.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from vllm_clone.core.cost import CostModel, StepCost
from vllm_clone.core.engine_core import EngineCore
from vllm_clone.errors import ConfigError

HF = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 16, "vocab_size": 32,
}  # fmt: skip
KV = KVCacheConfig(4, (KVCacheGroup(("a", "b"), FullAttentionSpec(16, 1, 4, "bfloat16")),))
LINEAR = 2 * 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16)
"""Operations per token: two layers of q, k and v, o, and three matrices of the MLP."""
SCORES = 2 * 8 * 32
PAIR = 2 * 2 * 2 * 8
"""Two layers; a query times a key, and a weight times a value, over eight numbers of both heads."""
KV_BYTES = 2 * 2 * 4 * 2


def test_a_prompt_attends_to_a_triangle_and_a_decode_to_everything_before():
    model = CostModel(HF, KV, weight_bytes=1000)
    prompt, decode = (0, 3), (9, 10)
    assert model.step([prompt]) == StepCost(3 * LINEAR + SCORES + 6 * PAIR, 1000 + 3 * KV_BYTES, 3 * KV_BYTES)
    assert model.step([decode]) == StepCost(LINEAR + SCORES + 10 * PAIR, 1000 + 10 * KV_BYTES, KV_BYTES)
    both = model.step([prompt, decode])
    assert both.flops == model.step([prompt]).flops + model.step([decode]).flops
    assert both.read_bytes == 1000 + 13 * KV_BYTES
    assert model.step([]) == StepCost(0, 0, 0)


def test_the_engine_adds_up_steps_between_reports():
    config = fake_config()
    config.observability_config.enable_mfu_metrics = True
    config.model_config.hf_config = HF
    core = EngineCore(config, FakeExecutor)
    core.add_request(request())
    costs = []
    while core.has_work:
        stats = core.step()[0].scheduler_stats
        assert stats is not None
        costs.append(stats.flops)
    assert costs[0] > 0
    assert costs[2] - costs[1] == costs[3] - costs[2] > 0  # one more pair per layer and head


def test_a_model_of_unknown_shape_is_refused():
    config = fake_config()
    config.observability_config.enable_mfu_metrics = True
    with pytest.raises(ConfigError, match=r"--enable-mfu-metrics: config\.json does not state hidden_size"):
        EngineCore(config, FakeExecutor)
