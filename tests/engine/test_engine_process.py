"""Life and death of the engine process: always noticed, always in bounded time, nothing left."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import closing

import psutil
import pytest

from tests.engine.conftest import FAKE_ENGINE, in_child, run
from tests.engine.fakes import CRASH, HANG, fake_config
from vllm_clone.engine.async_llm import AsyncLLM
from vllm_clone.engine.core_client import ProcessClient
from vllm_clone.engine.engine_process import EngineProcess
from vllm_clone.engine.inputs import TokensPrompt
from vllm_clone.errors import EngineDeadError
from vllm_clone.messages import ShutdownRequest
from vllm_clone.sampling_params import RequestOutputKind, SamplingParams
from vllm_clone.utils.process import wait_readable

PACED = {"step_seconds": 0.005}
ENDLESS = SamplingParams(max_tokens=4000, output_kind=RequestOutputKind.DELTA)


async def consume(stream):
    async for _ in stream:
        pass


async def open_streams(engine: AsyncLLM, count: int) -> list[asyncio.Task]:
    """Streams that have all begun."""
    streams = [engine.generate("a", ENDLESS, f"r{i}") for i in range(count)]
    await asyncio.gather(*(anext(s) for s in streams))
    return [asyncio.create_task(consume(s)) for s in streams]


def engine_pid(engine: AsyncLLM) -> int:
    assert engine.ready is not None
    return engine.ready.pid


def test_start_returns_before_the_engine_is_up() -> None:
    begun = time.monotonic()
    with closing(EngineProcess.start(fake_config(), FAKE_ENGINE)) as process:
        started = time.monotonic() - begun
        ready = process.wait_ready()
        assert started < 0.1
        assert ready.pid == process.pid
        assert (ready.num_blocks, ready.block_size, ready.max_model_len) == (4096, 16, 4096)
        assert (ready.weight_bytes, ready.cache_dtype) == (123, "float32")
        assert ready.kv_cache_bytes == 4096 * 2 * 16 * 8 * 4


def test_the_sockets_have_no_name_that_could_be_left_behind_or_connected_to(tmp_path) -> None:
    with closing(EngineProcess.start(fake_config(), FAKE_ENGINE)) as process:
        assert not list((tmp_path / "s").iterdir())
        process.wait_ready()


@pytest.mark.parametrize("sync", [True, False])
def test_an_expected_failure_to_start_is_one_line_and_no_traceback(sync, capfd: pytest.CaptureFixture[str]) -> None:
    with closing(EngineProcess.start(fake_config(fake={"fail": "config"}), FAKE_ENGINE)) as process:

        async def wait() -> None:
            await ProcessClient(process).wait_ready()

        with pytest.raises(EngineDeadError) as failure:
            process.wait_ready() if sync else run(wait)
        assert str(failure.value) == "--fake is wrong; use the other one."
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err


def test_an_unexpected_failure_to_start_prints_its_traceback_once(capfd: pytest.CaptureFixture[str]) -> None:
    with closing(EngineProcess.start(fake_config(fake={"fail": "bug"}), FAKE_ENGINE)) as process:
        with pytest.raises(EngineDeadError, match="KeyError: 'missing piece'"):
            process.wait_ready()
        out, err = capfd.readouterr()
        assert (out + err).count("Traceback") == 1


def test_a_process_that_dies_without_a_word_is_reported() -> None:
    with (
        closing(EngineProcess.start(fake_config(), "tests.engine.no_such_module")) as process,
        pytest.raises(EngineDeadError, match="exit code 1"),
    ):
        process.wait_ready()


def test_a_start_that_takes_too_long_is_given_up(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "0.2")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with closing(EngineProcess.start(fake_config(fake={"fail": "slow", "fifo": str(fifo)}), FAKE_ENGINE)) as process:
        with pytest.raises(EngineDeadError, match="VLLM_ENGINE_READY_TIMEOUT_S"):
            process.wait_ready()
        begun = time.monotonic()
        process.close()
        assert time.monotonic() - begun < 1.0


def test_a_cache_too_small_for_one_request_says_what_fits() -> None:
    with (
        closing(EngineProcess.start(fake_config(num_blocks=11), FAKE_ENGINE)) as process,
        pytest.raises(EngineDeadError, match=r"--max-model-len of at most 160\."),
    ):
        process.wait_ready()


def test_killing_the_engine_ends_every_stream_within_two_seconds() -> None:
    async def main() -> None:
        async with in_child(fake_config(fake=PACED)) as engine:
            streams = await open_streams(engine, 8)
            killed = time.monotonic()
            os.kill(engine_pid(engine), signal.SIGKILL)
            results = await asyncio.gather(*streams, return_exceptions=True)
            assert time.monotonic() - killed < 2.0
            assert all(isinstance(r, EngineDeadError) and "SIGKILL" in str(r) for r in results)
            for later in (engine.check_health, lambda: engine.utility("ping"), lambda: consume(
                engine.generate("a", ENDLESS, "later")
            )):  # fmt: skip
                with pytest.raises(EngineDeadError):
                    await later()
            assert engine.errored

    run(main)


def test_an_idle_engine_that_dies_is_noticed_at_once() -> None:
    async def main() -> None:
        async with in_child(fake_config()) as engine:
            os.kill(engine_pid(engine), signal.SIGKILL)
            async with asyncio.timeout(1.0):
                error = await engine.wait_dead()
            assert "SIGKILL" in str(error)

    run(main)


def test_sigterm_to_the_engine_answers_open_requests_with_abort() -> None:
    async def main() -> None:
        async with in_child(fake_config(fake=PACED)) as engine:
            stream = engine.generate("a", ENDLESS, "r")
            await anext(stream)
            os.kill(engine_pid(engine), signal.SIGTERM)
            rest = [output async for output in stream]
            assert rest[-1].outputs[0].finish_reason == "abort"
            assert "exit code 0" in str(await engine.wait_dead())

    run(main)


def test_sigint_does_not_reach_the_engine() -> None:
    async def main() -> None:
        async with in_child(fake_config()) as engine:
            os.kill(engine_pid(engine), signal.SIGINT)
            assert await engine.utility("ping") is True

    run(main)


def test_an_engine_that_hangs_at_shutdown_is_killed_in_bounded_time(tmp_path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    async def main() -> None:
        async with in_child(fake_config(fake={"fifo": str(fifo)})) as engine:
            stream = engine.generate(TokensPrompt([HANG]), SamplingParams(), "r")
            stuck = asyncio.create_task(anext(stream))
            writer = await asyncio.to_thread(os.open, fifo, os.O_WRONLY)  # returns once the engine hangs
            begun = time.monotonic()
            await engine.shutdown()
            assert time.monotonic() - begun < 5.0
            os.close(writer)
            assert (await stuck).outputs[0].finish_reason == "abort"
            await stream.aclose()

    run(main)


def test_a_suspended_engine_can_be_closed() -> None:
    with closing(EngineProcess.start(fake_config(), FAKE_ENGINE)) as process:
        process.wait_ready()
        os.kill(process.pid, signal.SIGSTOP)
        begun = time.monotonic()
        process.close()
        assert time.monotonic() - begun < 4.0


@pytest.mark.parametrize("loading", [False, True], ids=["ready", "loading"])
def test_the_engine_goes_with_a_parent_that_is_killed(loading: bool, tmp_path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    command = [sys.executable, "-m", "tests.engine.fake_parent", str(fifo) if loading else ""]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        while not (line := parent.stdout.readline()).strip().isdigit():  # the engine logs there too
            assert line
        engine = os.pidfd_open(int(line))
        parent.kill()
        ended = wait_readable([engine], 2)
        os.close(engine)
        assert ended
        assert {entry.name for entry in tmp_path.iterdir()} <= {"fifo", "s"}


def test_an_idle_engine_uses_no_processor_time() -> None:
    with closing(EngineProcess.start(fake_config(), FAKE_ENGINE)) as process:
        process.wait_ready()
        engine = psutil.Process(process.pid)
        before = sum(engine.cpu_times()[:2])
        time.sleep(1)  # the measurement itself: an idle stretch of known length
        used = sum(engine.cpu_times()[:2]) - before
        assert used < 0.05


def test_the_exit_status_tells_how_the_engine_ended() -> None:
    with closing(EngineProcess.start(fake_config(), FAKE_ENGINE)) as process:
        process.wait_ready()
        process.send(ShutdownRequest())
        assert wait_readable([process.pidfd], 5)
        assert process.exit_description() == "exit code 0"


def test_a_failed_loop_exits_with_an_error() -> None:
    async def main() -> None:
        async with in_child(fake_config()) as engine:
            with pytest.raises(EngineDeadError, match="the fake model crashed"):
                await consume(engine.generate(TokensPrompt([CRASH]), SamplingParams(), "r"))

    run(main)
