"""Grammars with real logits: whatever a model of random weights would say, what it says is valid."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.models.families import VARIANTS, build, save
from vllm_clone import kernels
from vllm_clone.config import (
    CacheConfig,
    DeviceConfig,
    LoadConfig,
    ModelConfig,
    SchedulerConfig,
    StructuredOutputsConfig,
    VllmConfig,
)
from vllm_clone.core.engine_core import EngineCore
from vllm_clone.core.structured_output.manager import GrammarManager
from vllm_clone.core.structured_output.vocabulary import Vocabulary
from vllm_clone.executor import get_executor_class
from vllm_clone.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm_clone.sampling_params import SamplingParams, StructuredOutputsParams

EOS = 0
"""The model's ids 1 … 127 are ASCII; the few after them are padding, which no text has."""
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6}, "level": {"enum": [1, 22, 333]}, "ok": {"type": "boolean"},
    },
    "required": ["name", "level"],
    "additionalProperties": False,
}  # fmt: skip


def is_object(text: str) -> bool:
    value = json.loads(text)
    keys = value.keys() <= {"name", "level", "ok"}
    return (
        keys and len(value["name"]) <= 6 and value["level"] in (1, 22, 333) and value.get("ok", True) in (True, False)
    )


GRAMMARS: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
    ({"json": SCHEMA, "disable_any_whitespace": True}, is_object),
    ({"regex": "[a-f]{2,5}-[0-9]{3}"}, re.compile("[a-f]{2,5}-[0-9]{3}").fullmatch),
    ({"choice": ["red", "green", "blue"]}, re.compile("red|green|blue").fullmatch),
    ({"grammar": 'root ::= "(" [xyz] [xyz]? ")"'}, re.compile(r"\([xyz][xyz]?\)").fullmatch),
    ({"grammar": 'start: "<" /[0-9]{1,4}/ ">"'}, re.compile(r"<\d{1,4}>").fullmatch),
]


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_THREADS", "1")
    kernels.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("llama")
    return path, save(build(VARIANTS["llama"]), path)


@pytest.fixture(params=["guidance", "xgrammar"])
def engine(request: pytest.FixtureRequest, model: tuple[Path, dict[str, Any]]) -> Callable[..., EngineCore]:
    if request.param == "xgrammar":
        pytest.importorskip("xgrammar")
    path, hf_config = model
    size = hf_config["vocab_size"]

    def vocabulary(config: VllmConfig) -> Vocabulary:
        texts = [b"", *(bytes([i]) for i in range(1, 128))]
        return Vocabulary(texts + [b""] * (size - 128), frozenset({EOS}), {EOS: b"</s>"}, (EOS,),
                          lambda text: list(text.encode()))  # fmt: skip

    def start(blocks: int = 200, tokens: int = 512, **scheduler: Any) -> EngineCore:
        config = VllmConfig(
            model_config=ModelConfig(
                model=str(path), path=str(path), hf_config=hf_config, architecture=hf_config["architectures"][0],
                vocab_size=size, dtype="float32", max_model_len=100,
            ),
            load_config=LoadConfig(use_tqdm_on_load=False),
            cache_config=CacheConfig(block_size=4, kv_cache_dtype="float32", num_gpu_blocks_override=blocks),  # type: ignore[arg-type]
            scheduler_config=SchedulerConfig(max_num_batched_tokens=tokens, max_num_seqs=16, **scheduler),
            device_config=DeviceConfig(device="cpu"),
            structured_outputs_config=StructuredOutputsConfig(backend=request.param),
        )  # fmt: skip
        core = EngineCore(config, get_executor_class(config))
        core.grammars = core.scheduler.grammars = GrammarManager(config, load=vocabulary, num_threads=1)
        return core

    return start


def sampling(index: int, fields: dict[str, Any] | None, **params: Any) -> SamplingParams:
    structured = None if fields is None else StructuredOutputsParams(**fields)
    values = {"temperature": 1.0, "seed": index, "max_tokens": 90, "eos_token_id": EOS, "stop_set": [EOS], **params}
    return SamplingParams(structured_outputs=structured, **values)


def run(core: EngineCore, requests: dict[str, SamplingParams], prompt: list[int]) -> dict[str, list[EngineCoreOutput]]:
    for name, params in requests.items():
        assert core.add_request(EngineCoreRequest(name, prompt, params, 0.0)) is None
    known = list(core.scheduler.requests.values())  # all begin together, however long their grammars take
    core.grammars.wait(lambda: all(r.grammar is None or r.grammar.is_compiled for r in known))
    outputs: dict[str, list[EngineCoreOutput]] = {name: [] for name in requests}
    steps = 0
    while core.num_unfinished or core.has_work:
        core.wait_for_grammars()
        for batch in core.step().values():
            for output in batch.outputs:
                assert output.error is None
                outputs[output.request_id].append(output)
        steps += 1
        assert steps < 3000, "the engine does not come to an end"
    return outputs


def ids_of(outputs: list[EngineCoreOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def text(outputs: list[EngineCoreOutput]) -> str:
    *ids, last = ids_of(outputs)
    assert last == EOS
    return bytes(ids).decode()


def mixed(count: int, **params: Any) -> dict[str, SamplingParams]:
    """Constrained requests of every kind, and as many free ones between them."""
    requests = {}
    for i in range(count):
        requests[f"bound {i}"] = sampling(i, GRAMMARS[i % len(GRAMMARS)][0], **params)
        requests[f"free {i}"] = sampling(i, None, max_tokens=12)
    return requests


def check(outputs: dict[str, list[EngineCoreOutput]], count: int) -> None:
    for i in range(count):
        bound = outputs[f"bound {i}"]
        assert GRAMMARS[i % len(GRAMMARS)][1](text(bound)), text(bound)
        assert bound[-1].finish_reason is FinishReason.STOP


def test_every_constrained_text_of_a_mixed_batch_is_valid(engine: Callable[..., EngineCore]):
    check(run(engine(), mixed(20), [5, 6, 7]), 20)


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}])
def test_filters_of_the_sampler_work_on_what_the_grammar_leaves(engine: Callable[..., EngineCore], params: Any):
    check(run(engine(), mixed(5, **params), [5, 6, 7]), 5)


def test_texts_stay_valid_and_the_same_when_requests_are_preempted(engine: Callable[..., EngineCore]):
    roomy = run(engine(), mixed(8), [5, 6, 7])
    crowded = run(engine(blocks=27), mixed(8), [5, 6, 7])
    assert sum(outputs[-1].num_preemptions for outputs in crowded.values()) > 0
    check(crowded, 8)
    assert {name: ids_of(outputs) for name, outputs in crowded.items()} == {
        name: ids_of(outputs) for name, outputs in roomy.items()
    }


def test_prompts_in_chunks_are_masked_at_their_end_alone(engine: Callable[..., EngineCore]):
    outputs = run(engine(tokens=8), mixed(4), list(range(10, 25)))
    check(outputs, 4)


def test_free_requests_say_the_same_whether_or_not_others_are_constrained(engine: Callable[..., EngineCore]):
    alone = run(engine(), {f"free {i}": sampling(i, None, max_tokens=12) for i in range(6)}, [5, 6, 7])
    beside = run(engine(), mixed(6), [5, 6, 7])
    for name, outputs in alone.items():
        assert ids_of(beside[name]) == ids_of(outputs)


def test_logprobs_are_those_of_what_the_grammar_leaves(engine: Callable[..., EngineCore]):
    fields = {"choice": ["a", "b"]}
    outputs = run(engine(), {"one": sampling(0, fields, logprobs=3, temperature=0.0)}, [5, 6, 7])["one"]
    rows = outputs[0].logprobs
    assert rows is not None
    finite = {i: value for i, value in zip(rows.token_ids[0], rows.logprobs[0], strict=True) if value > -1000}
    assert finite.keys() == {ord("a"), ord("b")}


def test_min_tokens_keeps_a_text_going_where_the_grammar_can(engine: Callable[..., EngineCore]):
    fields = {"regex": "[a-z]{1,40}"}
    for seed in range(5):
        outputs = run(engine(), {"one": sampling(seed, fields, min_tokens=20)}, [5, 6, 7])["one"]
        assert len(text(outputs)) >= 20
    short = run(engine(), {"one": sampling(0, {"choice": ["ab"]}, min_tokens=20)}, [5, 6, 7])["one"]
    assert text(short) == "ab", "the grammar's end has the last word"


def test_ids_that_the_request_excludes_as_well_leave_nothing_which_is_its_own_error(engine: Callable[..., EngineCore]):
    core = engine()
    params = sampling(0, {"choice": ["a"]}, allowed_token_ids=[ord("b")])
    assert core.add_request(EngineCoreRequest("r", [5], params, 0.0)) is None
    outputs = []
    while core.num_unfinished or core.has_work:
        core.wait_for_grammars()
        outputs += [output for batch in core.step().values() for output in batch.outputs]
    assert [(o.finish_reason, o.error_kind) for o in outputs] == [(FinishReason.ERROR, "invalid")]
