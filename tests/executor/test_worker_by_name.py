"""--worker-extension-cls, collective_rpc and --profiler-config, on the real worker."""

import gzip
import json
from pathlib import Path

import pytest

from vllm_clone.config import VllmConfig
from vllm_clone.engine.arg_utils import EngineArgs
from vllm_clone.entrypoints.llm import LLM
from vllm_clone.errors import ConfigError, RequestError
from vllm_clone.executor.uniproc import extended
from vllm_clone.sampling_params import SamplingParams
from vllm_clone.worker.worker import Worker

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


class Extension:
    """What a user might add."""

    def parameter_count(self: Worker, scale: int, *, offset: int = 0) -> int:
        return scale * sum(p.numel() for p in self.runner.model.parameters()) + offset


class Clash:
    def execute_model(self) -> None:
        """The worker has that."""


@pytest.fixture
def directory(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def make(directory: str, **args: object) -> LLM:
    return LLM(directory, load_format="dummy", skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 20, **args)


def test_methods_of_the_extension_can_be_called_by_name(directory: str) -> None:
    llm = make(directory, worker_extension_cls=f"{__name__}.Extension")
    (count,) = llm.collective_rpc("parameter_count", (1,))
    assert count > 64 * 32
    assert llm.collective_rpc("parameter_count", (2,), {"offset": 5}) == [2 * count + 5]
    with pytest.raises(AttributeError, match="no_such"):
        llm.collective_rpc("no_such")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Clash", "the worker has execute_model already; rename it"),
        ("CONFIG", "is no class"),
        ("Nothing", "has no Nothing"),
    ],
)
def test_an_extension_that_cannot_be_mixed_in_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        extended(Worker, f"{__name__}.{name}")


def traces(directory: Path) -> list[list[str]]:
    """Names of events, by file."""
    found = []
    for path in sorted(directory.glob("*.json*")):
        text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        found.append([event.get("name", "") for event in json.loads(text)["traceEvents"]])
    return found


@pytest.mark.parametrize("gzipped", [False, True])
def test_a_profile_holds_the_steps_between_start_and_stop(directory: str, tmp_path: Path, gzipped: bool) -> None:
    where = tmp_path / "traces"
    options = {"profiler": "torch", "torch_profiler_dir": str(where), "torch_profiler_use_gzip": gzipped}
    llm = make(directory, profiler_config=options, enforce_eager=True)
    prompt, params = [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True)
    llm.generate([prompt], params, use_tqdm=False)
    llm.start_profile()
    llm.generate([prompt], params, use_tqdm=False)
    llm.stop_profile()
    llm.generate([prompt], params, use_tqdm=False)
    (names,) = traces(where)
    assert any(name.startswith("aten::") for name in names)
    assert all(path.name.endswith(".gz") is gzipped for path in where.iterdir())


def test_a_profile_may_begin_late_and_end_early(directory: str, tmp_path: Path) -> None:
    where = tmp_path / "traces"
    options = {
        "profiler": "torch", "torch_profiler_dir": str(where), "delay_iterations": 2, "max_iterations": 3,
        "torch_profiler_with_stack": False, "torch_profiler_record_shapes": True,
    }  # fmt: skip
    llm = make(directory, profiler_config=options)
    llm.start_profile()
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert not traces(where)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(traces(where)) == 1
    llm.stop_profile()
    assert len(traces(where)) == 1


def test_without_the_flag_there_is_no_profile(directory: str) -> None:
    with pytest.raises(RuntimeError, match="--profiler-config was not given"):
        make(directory).start_profile()


def config(directory: str, **values: object) -> VllmConfig:
    return EngineArgs(model=directory, device="cpu", **values).create_engine_config("offline")


@pytest.mark.parametrize(
    "options",
    [
        {"profiler": "cuda", "torch_profiler_dir": "x"},
        {"profiler": "torch"},
        {"profiler": "torch", "torch_profiler_dir": ""},
        {"profiler": "torch", "torch_profiler_dir": "x", "delay_iterations": -1},
        {"profiler": "torch", "torch_profiler_dir": "x", "no_such": 1},
    ],
)
def test_wrong_profiler_options_are_refused_before_the_start(directory: str, options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"--profiler-config: .*keys are profiler, torch_profiler_dir"):
        config(directory, profiler_config=options)


def test_a_logits_processor_of_ones_own_decides_what_is_said(directory: str) -> None:
    llm = make(directory, logits_processors=["tests.sample.test_logits_processor.Follower"])
    free = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
    (plain,) = llm.generate([[1, 2, 3]], free, use_tqdm=False)
    said = plain.outputs[0].token_ids
    bound = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0, extra_args={"forbid": said[1]})
    ones, others = llm.generate([[1, 2, 3], [1, 2, 3]], [bound, free], use_tqdm=False)
    assert others.outputs[0].token_ids == said
    assert ones.outputs[0].token_ids[0] == said[0]  # nothing was said before it
    assert said[1] not in ones.outputs[0].token_ids[1:]


def test_a_logits_processor_may_refuse_a_request(directory: str) -> None:
    llm = make(directory, logits_processors=["tests.sample.test_logits_processor.Follower"])
    with pytest.raises(RequestError, match="forbid must be a token id"):
        llm.generate([[1]], SamplingParams(extra_args={"forbid": -1}), use_tqdm=False)
