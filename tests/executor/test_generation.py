"""Engine core, scheduler, runner, kernels and model together, against transformers, in float32."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.models.families import VARIANTS, build, save
from vllm_clone import kernels
from vllm_clone.config import CacheConfig, DeviceConfig, LoadConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm_clone.core.engine_core import EngineCore
from vllm_clone.executor import get_executor_class
from vllm_clone.messages import EngineCoreRequest, FinishReason
from vllm_clone.sampling_params import SamplingParams

PROMPTS = [[5], list(range(10, 47)), [9, 8, 7] * 9, list(range(100, 60, -1)), [3, 4, 5, 6]]
NUM_OUTPUTS = 24


@dataclass
class Checkpoint:
    path: Path
    hf_config: dict[str, Any]
    model: PreTrainedModel
    greedy: dict[int, list[int]] = field(default_factory=dict)

    @torch.no_grad()
    def continuation(self, i: int) -> list[int]:
        """What transformers generates after prompt ``i``."""
        if i not in self.greedy:
            ids = torch.tensor([PROMPTS[i]])
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NUM_OUTPUTS,
                min_new_tokens=NUM_OUTPUTS,
                eos_token_id=None,
                pad_token_id=0,
            )
            self.greedy[i] = out[0, len(PROMPTS[i]) :].tolist()
        return self.greedy[i]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_THREADS", "1")
    kernels.set_num_threads(1)


FAMILIES = ["llama", "mistral-window", "qwen2-window", "qwen3", "gemma2", "gemma3", "gpt2"]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    path = tmp_path_factory.mktemp(request.param)
    model = build(VARIANTS[request.param])
    return Checkpoint(path, save(model, path), model)


@pytest.fixture
def engine(checkpoint: Checkpoint) -> Callable[..., EngineCore]:
    def start(
        *,
        tokens: int = 512,
        seqs: int = 8,
        blocks: int = 200,
        block_size: int = 4,
        caching: bool = True,
        **scheduler: Any,
    ) -> EngineCore:
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(checkpoint.path),
                path=str(checkpoint.path),
                hf_config=checkpoint.hf_config,
                architecture=checkpoint.hf_config["architectures"][0],
                vocab_size=checkpoint.hf_config["vocab_size"],
                dtype="float32",
                max_model_len=100,
            ),
            load_config=LoadConfig(use_tqdm_on_load=False),
            cache_config=CacheConfig(
                block_size=block_size,  # type: ignore[arg-type]
                kv_cache_dtype="float32",
                num_gpu_blocks_override=blocks,
                enable_prefix_caching=caching,
            ),
            scheduler_config=SchedulerConfig(max_num_batched_tokens=tokens, max_num_seqs=seqs, **scheduler),
            device_config=DeviceConfig(device="cpu"),
        )
        return EngineCore(config, get_executor_class(config))

    return start


@dataclass
class Result:
    token_ids: list[int] = field(default_factory=list)
    prompt_rows: Any = None
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0


def run(
    engine: EngineCore, requests: dict[str, tuple[list[int], SamplingParams]], *, stagger: int = 0
) -> dict[str, Result]:
    """Results of all requests; with ``stagger`` each one arrives so many steps after the one before."""
    results = {name: Result() for name in requests}
    queue = list(requests.items())
    steps = 0
    while queue or engine.has_work:
        while queue and (not stagger or steps >= stagger * (len(requests) - len(queue))):
            name, (prompt, params) = queue.pop(0)
            assert engine.add_request(EngineCoreRequest(name, prompt, params, 0.0)) is None
        for outputs in engine.step().values():
            for output in outputs.outputs:
                assert output.error is None
                result = results[output.request_id]
                result.token_ids += output.new_token_ids
                result.prompt_rows = output.prompt_logprobs or result.prompt_rows
                result.finish_reason = output.finish_reason
                result.num_preemptions += output.num_preemptions
                if output.prefill_stats is not None:
                    result.num_cached_tokens = output.prefill_stats.num_cached_tokens
        steps += 1
        assert steps < 2000, "the engine does not come to an end"
    return results


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_OUTPUTS, "ignore_eos": True, **values})


def all_prompts(**values: Any) -> dict[str, tuple[list[int], SamplingParams]]:
    return {str(i): (prompt, params(**values)) for i, prompt in enumerate(PROMPTS)}


def smallest_pool(engine: Any, **schedule: Any) -> int:
    """Blocks that hold one sequence of full length, and no more."""
    return int(engine(**schedule).scheduler.kv.max_blocks(100)) + 1


SCHEDULES: dict[str, dict[str, Any]] = {
    "all at once": {},
    "budget of 7": {"tokens": 7, "seqs": 7},
    "no prefix caching": {"caching": False, "tokens": 16},
    "larger blocks": {"block_size": 16, "tokens": 50},
    "one at a time": {"seqs": 1},
    "no chunked prefill": {"enable_chunked_prefill": False, "tokens": 100},
    "short prefills": {"long_prefill_token_threshold": 5},
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_greedy_outputs_equal_transformers(checkpoint: Checkpoint, engine: Any, schedule: dict[str, Any]) -> None:
    results = run(engine(**schedule), all_prompts(), stagger=2)
    for i in range(len(PROMPTS)):
        assert results[str(i)].token_ids == checkpoint.continuation(i)
        assert results[str(i)].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("tokens", [512, 13])
def test_preemption_changes_no_token(checkpoint: Checkpoint, engine: Any, caching: bool, tokens: int) -> None:
    # The longest sequence alone fits a pool of this size; all of them together do not.
    results = run(engine(caching=caching, tokens=tokens, blocks=smallest_pool(engine, tokens=tokens)), all_prompts())
    # With a window and large steps, the smallest pool for one sequence may be room enough for all.
    windowed = bool(checkpoint.hf_config.get("sliding_window"))
    assert sum(r.num_preemptions for r in results.values()) > 0 or (windowed and tokens == 512)
    for i in range(len(PROMPTS)):
        assert results[str(i)].token_ids == checkpoint.continuation(i)


def test_seeded_draws_do_not_depend_on_schedule_or_preemption(checkpoint: Checkpoint, engine: Any) -> None:
    requests = {
        str(i): (p, params(temperature=1.0, seed=i, top_k=40 if i % 2 else 0, top_p=0.9 if i % 3 else 1.0,
                           frequency_penalty=0.5))
        for i, p in enumerate(PROMPTS)
    }  # fmt: skip
    schedules = ({}, {"tokens": 7, "seqs": 3}, {"seqs": 1}, {"blocks": smallest_pool(engine), "caching": False})
    answers = [[r.token_ids for r in run(engine(**s), requests).values()] for s in schedules]
    assert all(a == answers[0] for a in answers)
    assert answers[0] != [checkpoint.continuation(i) for i in range(len(PROMPTS))]


def test_prompt_logprobs_equal_the_full_forward(checkpoint: Checkpoint, engine: Any) -> None:
    for schedule in ({}, {"tokens": 7, "seqs": 7}):
        results = run(engine(**schedule), all_prompts(prompt_logprobs=2))
        for i, prompt in enumerate(PROMPTS):
            with torch.no_grad():
                scores = checkpoint.model(torch.tensor([prompt])).logits[0].log_softmax(-1)
            rows = results[str(i)].prompt_rows
            if len(prompt) == 1:
                assert not rows.token_ids
                continue
            assert [ids[0] for ids in rows.token_ids] == prompt[1:]
            expected = scores[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
            torch.testing.assert_close(torch.tensor([v[0] for v in rows.logprobs]), expected, rtol=1e-4, atol=1e-4)


def test_prompt_logprobs_survive_a_preemption_within_the_prompt(engine: Any) -> None:
    tight = engine(blocks=smallest_pool(engine, tokens=9), tokens=9, scheduler_reserve_full_isl=False, caching=False)
    # The first grows until the second, still in its prompt, has to give way.
    requests = {"a": (list(range(3, 63)), params()), "b": (list(range(60, 120)), params(prompt_logprobs=0))}
    preempted_at = []
    preempt = tight.scheduler._preempt
    tight.scheduler._preempt = lambda r: (preempted_at.append((r.request_id, r.num_computed_tokens)), preempt(r))
    results, roomy = run(tight, requests), run(engine(), requests)
    assert any(name == "b" and 0 < computed < 60 for name, computed in preempted_at)
    assert len(results["b"].prompt_rows.token_ids) == 59
    assert results["b"].prompt_rows.token_ids == roomy["b"].prompt_rows.token_ids


def test_a_cached_prefix_gives_the_same_answer(checkpoint: Checkpoint, engine: Any) -> None:
    core = engine()
    first = run(core, {"a": (PROMPTS[3], params())})["a"]
    again = run(core, {"b": (PROMPTS[3], params())})["b"]
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens > 0
    assert first.token_ids == again.token_ids == checkpoint.continuation(3)


def test_aborts_in_the_middle_disturb_nobody(checkpoint: Checkpoint, engine: Any) -> None:
    core = engine(tokens=11)
    for i, prompt in enumerate(PROMPTS):
        core.add_request(EngineCoreRequest(str(i), prompt, params(), 0.0))
    for _ in range(5):
        core.step()
    core.abort_requests(["1", "3"])
    tokens: dict[str, list[int]] = {}
    core.add_request(EngineCoreRequest("late", PROMPTS[2], params(), 0.0))
    while core.has_work:
        for outputs in core.step().values():
            for output in outputs.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    assert tokens["late"] == checkpoint.continuation(2)
    for i in (0, 2, 4):
        assert tokens[str(i)] == checkpoint.continuation(i)[-len(tokens[str(i)]) :]
    assert "1" not in tokens
    assert "3" not in tokens
