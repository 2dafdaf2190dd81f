"""--api-server-count: several HTTP processes over one engine behave as one server."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.e2e.server import Server, start
from tests.e2e.test_lifecycle import ARGS, Streams, _eventually, assert_gone

SHORT = {"model": "toy", "prompt": "Once", "max_tokens": 5, "ignore_eos": True}


def api_servers(server: Server) -> list[psutil.Process]:
    return [p for p in server.children() if "api_server_proc" in " ".join(p.cmdline())]


@pytest.fixture
def launched(toy_model: Path, tmp_path: Path) -> Iterator[object]:
    """Starts servers with two API servers each."""
    made: list[Server] = []

    def launch(*args: str) -> Server:
        server = start(str(toy_model), tmp_path / "server.log", *ARGS, "--api-server-count", "2", *args)
        made.append(server)
        server.wait_ready()
        return server

    yield launch
    for server in made:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()


def test_any_of_them_answers_and_metrics_and_load_cover_all(launched) -> None:
    server = launched("--enable-server-load-tracking")
    assert len(api_servers(server)) == 2
    for _ in range(12):  # each on a connection of its own, which any of the two may take
        assert httpx.post(server.url + "/v1/completions", json=SHORT, timeout=60).status_code == 200
    for _ in range(4):
        assert server.metric("vllm:generation_tokens_total") == 60
        assert server.metric("vllm:request_success_total", finished_reason="length") == 12
    streams = Streams(server, 4)
    assert {server.get("/load").json()["server_load"] for _ in range(6)} == {4}
    assert _eventually(lambda: server.metric("vllm:num_requests_running") == 4, 5)
    assert server.stop() == 0
    streams.join(10)


def test_a_queue_limit_holds_for_all_together(launched) -> None:
    server = launched("--max-num-queued-reqs", "3")
    streams = Streams(server, 3)
    answers = [httpx.post(server.url + "/v1/completions", json=SHORT, timeout=60) for _ in range(6)]
    assert {a.status_code for a in answers} == {503}
    assert all("retry-after" in a.headers for a in answers)
    server.stop()
    streams.join(10)


def test_a_drain_finishes_the_open_requests_of_all(launched) -> None:
    server = launched("--shutdown-timeout", "60")
    family = server.children()
    streams = Streams(server, 6)
    server.process.send_signal(signal.SIGTERM)
    streams.join(60)
    assert server.process.wait(10) == 0
    assert all('"finish_reason":"length"' in "".join(lines[-3:]) for lines in streams.lines)
    assert_gone(family)


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_answers_open_requests_with_abort(launched, sig: int) -> None:
    server = launched()
    family = server.children()
    streams = Streams(server, 4)
    assert server.stop(sig) == 0
    streams.join(5)
    for lines, error in zip(streams.lines, streams.errors, strict=True):
        assert error is None
        assert lines[-1] == "data: [DONE]"
    assert_gone(family)


def test_killing_the_engine_answers_every_stream_and_ends_with_1(launched) -> None:
    server = launched()
    family = server.children()
    streams = Streams(server, 4)
    server.engine().kill()
    streams.join(5)
    for lines, error in zip(streams.lines, streams.errors, strict=True):
        assert error is None
        assert '"error"' in lines[-2]
    assert server.process.wait(8) == 1
    assert_gone(family)


def test_killing_one_api_server_ends_all_with_answers_where_it_can(launched) -> None:
    server = launched()
    family = server.children()
    victim, other = api_servers(server)
    victim.kill()
    assert server.process.wait(10) == 1
    assert f"API server {victim.pid} ended unexpectedly (signal SIGKILL)" in server.log.read_text()
    assert other.pid
    assert_gone(family)


def test_killing_the_supervisor_leaves_no_orphan(launched) -> None:
    server = launched()
    family = server.children()
    server.process.kill()
    assert_gone(family)


def test_an_engine_that_cannot_start_is_told_in_one_line(toy_model: Path, tmp_path: Path) -> None:
    assert "16M" in ARGS
    args = [a if a != "16M" else "4K" for a in ARGS]
    server = start(str(toy_model), tmp_path / "server.log", *args, "--api-server-count", "3")
    try:
        assert server.process.wait(60) == 1
    finally:
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
    errors = [line for line in server.log.read_text().splitlines() if line.startswith("vllm: error:")]
    assert len(errors) == 1
    assert "--kv-cache-memory-bytes" in errors[0]
