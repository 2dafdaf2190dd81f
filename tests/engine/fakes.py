"""An engine without a model: an executor whose tokens are known beforehand, and a tokenizer of single bytes.

Token ids 0 … 255 are bytes, 256 is EOS. After a letter comes the next one of the alphabet, after anything else
an "a"; see :func:`expected_ids`. Some prompt tokens make the executor misbehave.
"""

import dataclasses
import threading
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from vllm_clone.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm_clone.config.kv_cache import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from vllm_clone.errors import ConfigError
from vllm_clone.executor.base import Executor
from vllm_clone.messages import LogprobRows
from vllm_clone.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from vllm_clone.tokenizers.base import byte_alphabet
from vllm_clone.tokenizers.fast import FastTokenizer

EOS = 256
VOCAB = 257
CRASH = 1
"""Prompt token: the step that samples for it raises."""
HANG = 2
"""Prompt token: the step that samples for it waits until the FIFO ``hf_config["fifo"]`` is opened for writing."""
ENDS = 3
"""Prompt token: the fifth output is EOS."""


def fake_config(*, max_model_len: int = 4096, num_blocks: int = 4096, fake: dict[str, Any] | None = None,
                **model: Any) -> VllmConfig:  # fmt: skip
    """``fake``: step_seconds (each step takes at least that), fifo, fail ("config" or "bug")."""
    return VllmConfig(
        model_config=ModelConfig(
            model="fake", max_model_len=max_model_len, vocab_size=VOCAB, eos_token_ids=[EOS], hf_config=fake or {},
            **model,
        ),
        cache_config=CacheConfig(block_size=16, num_gpu_blocks_override=num_blocks),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=64),
    )  # fmt: skip


def with_scheduler(config: VllmConfig, **fields: Any) -> VllmConfig:
    return dataclasses.replace(config, scheduler_config=dataclasses.replace(config.scheduler_config, **fields))


def next_id(history: list[int], num_prompt: int) -> int:
    if history[0] == ENDS and len(history) - num_prompt == 4:
        return EOS
    last = history[-1]
    return last + 1 if ord("a") <= last < ord("z") else ord("a")


def expected_ids(prompt: list[int], count: int) -> list[int]:
    """The first ``count`` outputs."""
    history = list(prompt)
    for _ in range(count):
        history.append(next_id(history, len(prompt)))
    return history[len(prompt) :]


def expected_text(prompt: str, count: int) -> str:
    return bytes(expected_ids(list(prompt.encode()), count)).decode()


class FakeExecutor(Executor):
    """Keeps each request's tokens and says the next one when all before it have been computed."""

    weight_bytes = 123

    def __init__(self, config: VllmConfig) -> None:
        self._fake = config.model_config.hf_config
        self._requests: dict[str, NewRequest] = {}
        self._history: dict[str, list[int]] = {}
        self._computed: dict[str, int] = {}
        self._masks: dict[str, bytes] = {}
        self.is_shut_down = False

    def load_model(self) -> None:
        if self._fake.get("fail") == "config":
            raise ConfigError("--fake is wrong; use the other one.")
        if self._fake.get("fail") == "bug":
            raise KeyError("missing piece")
        if "fifo" in self._fake and self._fake.get("fail") == "slow":
            _wait_for_writer(self._fake["fifo"])

    def get_kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {"layer": FullAttentionSpec(16, 1, 8, "float32")}

    def determine_available_memory(self) -> int:
        return 1 << 20

    def initialize_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        pass

    def execute_model(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if "step_seconds" in self._fake:
            threading.Event().wait(self._fake["step_seconds"])  # the time a model would take
        for gone in step.finished_req_ids | step.preempted_req_ids:
            self._forget(gone)
        for new in step.new:
            self._requests[new.req_id] = new
            self._history[new.req_id] = list(new.token_ids)
            self._computed[new.req_id] = new.num_computed_tokens
        self._masks = masks_of(step)
        output = ModelRunnerOutput({})
        for request_id, count in step.num_scheduled_tokens.items():
            self._computed[request_id] += count
            if self._computed[request_id] == len(self._history[request_id]):
                self._sample(request_id, output)
        return output

    def check_health(self) -> None:
        if self.is_shut_down:
            raise RuntimeError("shut down")

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _sample(self, request_id: str, output: ModelRunnerOutput) -> None:
        request, history = self._requests[request_id], self._history[request_id]
        if history[0] == CRASH:
            raise RuntimeError("the fake model crashed")
        if history[0] == HANG:
            _wait_for_writer(self._fake["fifo"])
        token = self._permitted(request_id, next_id(history, request.num_prompt_tokens))
        history.append(token)
        output.sampled_token_ids[request_id] = [token]
        top = request.sampling_params.logprobs
        if top is not None:
            ids = [token, *range(token, token + top)] if top else [token]
            output.logprobs[request_id] = LogprobRows([ids], [[-0.5 * i for i in range(len(ids))]], [1])
        if request.sampling_params.prompt_logprobs is not None and len(history) == request.num_prompt_tokens + 1:
            rows = [[i] for i in history[1 : request.num_prompt_tokens]]
            output.prompt_logprobs[request_id] = LogprobRows(rows, [[-1.0]] * len(rows), [3] * len(rows))

    def _permitted(self, request_id: str, token: int) -> int:
        """``token``, or the first one that the request's grammar allows instead."""
        words = self._masks.get(request_id)
        if words is None or words[token >> 3] >> (token & 7) & 1:
            return token
        return next(i for i in range(8 * len(words)) if words[i >> 3] >> (i & 7) & 1)

    def _forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._history.pop(request_id, None)
        self._computed.pop(request_id, None)


def masks_of(step: SchedulerOutput) -> dict[str, bytes]:
    """The grammars' masks by request: bit v % 8 of byte v // 8 allows token v."""
    masks = step.grammar
    if masks is None:
        return {}
    size = len(masks.words) // len(masks.req_ids)
    return {name: bytes(masks.words[i * size : (i + 1) * size]) for i, name in enumerate(masks.req_ids)}


def _wait_for_writer(fifo: str) -> None:
    with open(fifo, "rb") as pipe:
        pipe.read()


def byte_tokenizer() -> FastTokenizer:
    """Every byte is a token, so any text has ids, and characters may be split between tokens."""
    backend = Backend(models.BPE(vocab=byte_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["</s>"])
    return FastTokenizer(backend, "bytes", {"eos_token": "</s>"}, None, {})
