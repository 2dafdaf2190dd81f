"""Engines over the fake executor, in a thread and in a real child process."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import uvloop

from tests.engine.fakes import FakeExecutor, byte_tokenizer, fake_config
from vllm_clone.config import VllmConfig
from vllm_clone.engine.async_llm import AsyncLLM
from vllm_clone.engine.core_client import ProcessClient, ThreadClient
from vllm_clone.engine.engine_process import EngineProcess

FAKE_ENGINE = "tests.engine.fake_engine_main"


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No process, file, socket or directory outlives a test."""
    sockets = tmp_path / "s"
    sockets.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr("tempfile.tempdir", str(sockets))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.sleep(0))  # uvloop's first loop opens files for good
    files = len(os.listdir("/proc/self/fd"))
    others = set(psutil.Process().children(recursive=True))  # servers that other tests of this worker share
    yield
    assert not set(psutil.Process().children(recursive=True)) - others
    assert len(os.listdir("/proc/self/fd")) == files
    assert not list(sockets.iterdir())


@contextlib.asynccontextmanager
async def in_process(config: VllmConfig, **kwargs: Any) -> AsyncIterator[AsyncLLM]:
    engine = AsyncLLM(config, ThreadClient(config, FakeExecutor), byte_tokenizer(), **kwargs)
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.shutdown()


@contextlib.asynccontextmanager
async def in_child(config: VllmConfig, **kwargs: Any) -> AsyncIterator[AsyncLLM]:
    process = EngineProcess.start(config, FAKE_ENGINE)
    engine = AsyncLLM(config, ProcessClient(process), byte_tokenizer(), **kwargs)
    try:
        await engine.wait_ready()
        yield engine
    finally:
        await engine.shutdown()


Engine = Callable[..., contextlib.AbstractAsyncContextManager[AsyncLLM]]


@pytest.fixture(params=[in_process, in_child], ids=["thread", "process"])
def engine_of(request: pytest.FixtureRequest) -> Engine:
    """``async with engine_of(config) as engine``: both kinds of engine must behave alike."""
    return request.param


def run(main: Callable[[], Awaitable[None]], seconds: float = 30.0) -> None:
    """Run a coroutine function; a test that hangs fails after ``seconds``."""

    async def bounded() -> None:
        async with asyncio.timeout(seconds):
            await main()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the server does
        runner.run(bounded())


@pytest.fixture
def config() -> VllmConfig:
    return fake_config()
