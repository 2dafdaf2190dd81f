"""Start, stop and death of the server's processes: always an answer, never an orphan."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.server import Server, free_port, living, running, start

ARGS = ("--served-model-name", "toy", "--kv-cache-memory-bytes", "16M")
LONG = {"model": "toy", "prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "temperature": 1.0}


class Streams:
    """Open streams read by threads; each ends with the lines it saw, or the transport error that cut it."""

    def __init__(self, server: Server, count: int) -> None:
        self.lines: list[list[str]] = [[] for _ in range(count)]
        self.errors: list[Exception | None] = [None] * count
        self.ended = [0.0] * count
        self.started = threading.Barrier(count + 1)
        self.threads = [threading.Thread(target=self._read, args=(server, i)) for i in range(count)]
        for thread in self.threads:
            thread.start()
        self.started.wait(30)

    def _read(self, server: Server, i: int) -> None:
        try:
            with httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "stream": True}, timeout=60) as r:
                assert r.status_code == 200
                lines = r.iter_lines()
                self.lines[i].append(next(lines))
                self.started.wait(30)
                self.lines[i] += [line for line in lines if line]
        except httpx.TransportError as error:
            self.errors[i] = error
        self.ended[i] = time.monotonic()

    def join(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for thread in self.threads:
            thread.join(max(deadline - time.monotonic(), 0))
        assert not any(t.is_alive() for t in self.threads), "a client is still waiting"


def assert_gone(family: list[psutil.Process], timeout: float = 3.0) -> None:
    assert _eventually(lambda: not living(family), timeout), f"left behind: {living(family)}"


def _status(client: httpx.Client, path: str) -> int:
    try:
        return client.get(path).status_code
    except httpx.TransportError:
        return 0


def _eventually(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


@pytest.fixture
def server(toy_model: Path, tmp_path: Path):
    with_args = start(str(toy_model), tmp_path / "server.log", *ARGS)
    try:
        with_args.wait_ready()
        yield with_args
    finally:
        if with_args.process.poll() is None:
            os.killpg(with_args.process.pid, signal.SIGKILL)
        with_args.process.wait()


def test_killing_the_engine_ends_every_stream_with_an_error_within_two_seconds(server: Server) -> None:
    family = server.children()
    streams = Streams(server, 8)
    killed = time.monotonic()
    server.engine().kill()
    streams.join(5)
    assert max(streams.ended) - killed < 2.0
    for lines, error in zip(streams.lines, streams.errors, strict=True):
        assert error is None
        assert '"error"' in lines[-2]
        assert lines[-1] == "data: [DONE]"
    assert server.process.wait(5) != 0
    assert_gone(family)


def test_an_idle_server_whose_engine_dies_exits_with_an_error(server: Server) -> None:
    killed = time.monotonic()
    server.engine().kill()
    assert server.process.wait(5) != 0
    assert time.monotonic() - killed < 2.5


def test_killing_the_front_process_leaves_no_orphan(server: Server) -> None:
    family = server.children()
    streams = Streams(server, 2)
    server.process.kill()
    assert_gone(family)
    streams.join(5)


def test_health_says_503_while_the_engine_hangs_and_recovers(toy_model: Path, tmp_path: Path) -> None:
    env = {"VLLM_ENGINE_HEALTH_TIMEOUT": "1"}
    with running(str(toy_model), tmp_path / "server.log", *ARGS, env=env) as server:
        engine = server.engine()
        engine.suspend()
        try:
            assert _eventually(lambda: server.get("/health", timeout=10).status_code == 503, 8)
        finally:
            engine.resume()
        assert _eventually(lambda: server.get("/health", timeout=10).status_code == 200, 8)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_an_idle_server_cleanly(server: Server, sig: int) -> None:
    family = server.children()
    begun = time.monotonic()
    assert server.stop(sig) == 0
    assert time.monotonic() - begun < 3
    assert_gone(family)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_answers_open_requests_with_abort(server: Server, sig: int) -> None:
    family = server.children()
    streams = Streams(server, 3)
    assert server.stop(sig) == 0
    streams.join(5)
    for lines, error in zip(streams.lines, streams.errors, strict=True):
        assert error is None
        assert any('"finish_reason":"abort"' in line or '"error"' in line for line in lines[-3:])
        assert lines[-1] == "data: [DONE]"
    assert_gone(family)


def test_a_drain_finishes_open_requests_and_refuses_new_ones(toy_model: Path, tmp_path: Path) -> None:
    server = start(str(toy_model), tmp_path / "server.log", *ARGS, "--shutdown-timeout", "60")
    try:
        server.wait_ready()
        streams = Streams(server, 2)
        with httpx.Client(base_url=server.url) as client:
            assert client.get("/v1/models").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            assert _eventually(lambda: client.get("/health").status_code == 503, 5)
            assert client.post("/v1/completions", json=LONG).status_code == 503
        streams.join(60)
        assert server.process.wait(10) == 0
        assert all('"finish_reason":"length"' in "".join(lines[-3:]) for lines in streams.lines)
    finally:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def test_a_second_signal_ends_a_drain_now(toy_model: Path, tmp_path: Path) -> None:
    server = start(str(toy_model), tmp_path / "server.log", *ARGS, "--shutdown-timeout", "60")
    try:
        server.wait_ready()
        family = server.children()
        streams = Streams(server, 2)
        server.process.send_signal(signal.SIGTERM)
        with httpx.Client(base_url=server.url) as client:
            assert _eventually(lambda: _status(client, "/health") != 200, 5)
        begun = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(5)
        assert time.monotonic() - begun < 2
        streams.join(5)
        assert_gone(family)
    finally:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def test_ctrl_c_during_start_leaves_nothing(toy_model: Path, tmp_path: Path) -> None:
    server = start(str(toy_model), tmp_path / "server.log", *ARGS)
    family: list[psutil.Process] = []
    try:
        assert _eventually(lambda: bool(family.extend(server.children()) or family), 10)
        os.killpg(server.process.pid, signal.SIGINT)
        server.process.wait(5)
        assert_gone(family)
    finally:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.wait()
    assert "Traceback" not in server.log.read_text()


def test_a_busy_port_is_refused_before_any_weight_is_loaded(toy_model: Path, tmp_path: Path) -> None:
    port = free_port()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        server = start(str(toy_model), tmp_path / "server.log", *ARGS, port=port)
        assert server.process.wait(10) == 1
    last = server.log.read_text().strip().splitlines()[-1]
    assert str(port) in last
    assert "Traceback" not in server.log.read_text()


def test_a_failed_engine_start_ends_with_cause_and_remedy(toy_model: Path, tmp_path: Path) -> None:
    server = start(str(toy_model), tmp_path / "server.log", "--kv-cache-memory-bytes", "1024")
    assert server.process.wait(30) != 0
    last = server.log.read_text().strip().splitlines()[-1]
    assert "kv-cache-memory-bytes" in last or "max-model-len" in last
    assert "Traceback" not in server.log.read_text()


def test_a_broken_checkpoint_is_named_in_one_line(toy_model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in toy_model.iterdir():
        data = file.read_bytes()
        (broken / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    server = start(str(broken), tmp_path / "server.log")
    assert server.process.wait(30) != 0
    text = server.log.read_text()
    assert "model.safetensors" in text.strip().splitlines()[-1]
    assert "Traceback" not in text


def test_a_disconnect_frees_the_request_at_once(server: Server) -> None:
    with httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "stream": True, "n": 32}) as response:
        lines = response.iter_lines()  # kept: its end would close the response
        next(lines)
        assert server.metric("vllm:num_requests_running") == 32
    assert _eventually(lambda: server.metric("vllm:num_requests_running") == 0, 2)
    assert _eventually(lambda: server.metric("vllm:kv_cache_usage_perc") == 0, 2)


def test_a_plain_request_that_is_given_up_is_freed_too(server: Server) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + "/v1/completions", json={**LONG, "n": 32}, timeout=0.5)
    assert _eventually(lambda: server.metric("vllm:num_requests_running") == 0, 3)


def test_an_idle_server_uses_less_than_three_percent_of_a_core(server: Server) -> None:
    family = [psutil.Process(server.process.pid), *server.children()]

    def used() -> float:
        return sum(sum(process.cpu_times()[:2]) for process in family)

    for _ in range(2):  # fresh, and after a request
        before = used()
        time.sleep(1)  # the measurement itself: an idle stretch of known length
        assert used() - before < 0.03
        server.client().completions.create(model="toy", prompt="Once", max_tokens=4)


def test_all_processes_together_need_little_memory_beyond_the_model(server: Server) -> None:
    server.client().completions.create(model="toy", prompt="Once", max_tokens=4)
    assert server.resident_bytes() < 500 * 10**6


def test_the_threads_of_the_engine_stay_on_the_cores_they_are_given(toy_model: Path, tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    env = {"VLLM_CPU_OMP_THREADS_BIND": str(core)}
    with running(str(toy_model), tmp_path / "server.log", *ARGS, env=env) as server:
        answer = server.client().completions.create(model="toy", prompt="Once", max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        assert os.sched_getaffinity(server.engine().pid) == {core}
        assert os.sched_getaffinity(server.process.pid) == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("env", "args", "message"),
    [
        ({"VLLM_CPU_OMP_THREADS_BIND": "all"}, (), "VLLM_CPU_OMP_THREADS_BIND=all: must be auto, nobind, or cores"),
        ({"VLLM_CPU_OMP_THREADS_BIND": "60000"}, (), "core 60000 is not among those the engine may use"),
        ({}, ("--numa-bind-nodes", "0"), "--numa-bind-nodes needs --numa-bind"),
        ({}, ("--numa-bind", "--numa-bind-nodes", "900"), "this machine has no such NUMA node"),
    ],
)
def test_cores_that_cannot_be_had_are_refused_in_one_line(
    toy_model: Path, tmp_path: Path, env: dict[str, str], args: tuple[str, ...], message: str
) -> None:
    server = start(str(toy_model), tmp_path / "server.log", *ARGS, *args, env=env)
    assert server.process.wait(10) in (1, 2)
    text = server.log.read_text()
    assert message in text.strip().splitlines()[-1]
    assert "Traceback" not in text


def test_a_front_process_killed_while_the_engine_starts_leaves_nothing(toy_model: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    server = start(str(toy_model), tmp_path / "server.log", *ARGS, env={"TMPDIR": str(temporary)})
    family: list[psutil.Process] = []
    try:
        assert _eventually(lambda: bool(family.extend(server.children()) or family), 10)
    finally:
        server.process.kill()
        server.process.wait()
    assert_gone(family)
    assert not list(temporary.iterdir())


def test_the_in_process_engine_serves_too(toy_model: Path, tmp_path: Path) -> None:
    with running(str(toy_model), tmp_path / "server.log", *ARGS, "--disable-frontend-multiprocessing") as server:
        assert not any("engine_core_proc" in " ".join(p.cmdline()) for p in server.children())
        reply = httpx.post(server.url + "/v1/completions", json={**LONG, "max_tokens": 4}).json()
        assert reply["usage"]["completion_tokens"] == 4
