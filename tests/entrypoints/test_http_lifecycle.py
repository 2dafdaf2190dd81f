"""Clients that leave, engines that die, servers that are full."""

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.entrypoints.http_server import HTTPServer, http_config, logged
from vllm_clone.entrypoints.launchers.app import routes_of

DEAD = {"type": "InternalServerError", "param": None, "code": 500}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """For requests that wait."""
    with ThreadPoolExecutor(8) as made:
        yield made


def error_of(answer: httpx.Response | dict[str, Any]) -> dict[str, Any]:
    body = answer if isinstance(answer, dict) else answer.json()
    return {k: v for k, v in body["error"].items() if k != "message"}


def metric(server: HTTPServer, name: str, **labels: str) -> float:
    """A sample of /metrics."""
    wanted = [f'{k}="{v}"' for k, v in labels.items()]
    lines = server.client.get("/metrics").text.splitlines()
    (value,) = (
        line.split()[-1] for line in lines if line.split("{")[0].split()[0] == name and all(w in line for w in wanted)
    )
    return float(value)


@pytest.mark.parametrize("endpoint", ["complete", "chat"])
def test_a_client_that_leaves_a_stream_aborts_its_request(server: HTTPServer, endpoint: str):
    body: dict[str, Any] = (
        {"prompt": "x"} if endpoint == "complete" else {"messages": [{"role": "user", "content": "x"}]}
    )
    path = "/v1/completions" if endpoint == "complete" else "/v1/chat/completions"
    aborted = metric(server, "vllm:request_success_total", finished_reason="abort")
    server.hold_after = 3
    try:
        with server.client.stream("POST", path, json={**body, "max_tokens": 1500, "stream": True}) as answer:
            lines = answer.iter_lines()  # kept: its end would close the answer
            next(lines)
            assert server.num_requests == 1
        server.wait_until(lambda: server.num_requests == 0)
    finally:
        server.hold_after = None
        server.gate.set()
    assert metric(server, "vllm:request_success_total", finished_reason="abort") == aborted
    assert server.complete(max_tokens=1).status_code == 200
    assert metric(server, "vllm:num_requests_running") == 0
    assert metric(server, "vllm:kv_cache_usage_perc") == 0


def test_a_client_that_leaves_a_plain_request_aborts_it(server: HTTPServer):
    server.gate.clear()
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json={"prompt": ["x", "y"], "max_tokens": 1500}, timeout=0.3)
        server.wait_until(lambda: server.num_requests == 0)
    finally:
        server.gate.set()


@pytest.mark.parametrize("keep_alive", [0, 1])
def test_a_client_that_leaves_a_silent_stream_aborts_its_request(keep_alive: int):
    with HTTPServer(sse_keep_alive_interval=keep_alive) as server:
        server.gate.clear()
        with server.client.stream("POST", "/v1/completions", json={"prompt": ["x", "y"], "stream": True}):
            server.wait_until(lambda: server.num_requests == 2)
        server.wait_until(lambda: server.num_requests == 0)


def test_silence_is_filled_with_comments(pool: ThreadPoolExecutor):
    with HTTPServer(sse_keep_alive_interval=1) as server:
        server.gate.clear()
        with server.client.stream("POST", "/v1/completions", json={"prompt": "x", "stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines) == ": keep-alive"
            server.gate.set()
            rest = [line for line in lines if line]
        assert len(rest) == 17
        assert rest[-1] == "data: [DONE]"


def test_when_the_engine_dies_every_open_request_ends_with_an_error(pool: ThreadPoolExecutor):
    with HTTPServer() as server:
        server.gate.clear()
        streamed = pool.submit(server.complete, max_tokens=5, stream=True)
        chatted = pool.submit(server.chat, max_tokens=5, stream=True)
        plain = pool.submit(server.complete, prompt=["x", "y"], max_tokens=5)
        server.wait_until(lambda: server.num_requests == 4)
        server.broken = True
        server.gate.set()
        assert error_of(plain.result()) == DEAD
        assert plain.result().status_code == 500
        for answer in (streamed.result(), chatted.result()):
            assert answer.status_code == 200
            *_, last, done = [b.removeprefix("data: ") for b in answer.text.split("\n\n") if b]
            assert error_of(json.loads(last)) == DEAD
            assert done == "[DONE]"
        health = server.client.get("/health")
        assert (health.status_code, health.content) == (503, b"")
        assert server.client.get("/ping").status_code == 503
        later = server.chat()
        assert (later.status_code, error_of(later)) == (500, DEAD)
        assert server.client.get("/v1/models").status_code == 200
        assert server.client.get("/metrics").status_code == 200


@pytest.mark.parametrize(
    ("limit", "reason"),
    [({"max_num_queued_reqs": 1}, "max_num_queued_reqs"), ({"max_num_queued_tokens": 1}, "max_num_queued_tokens")],
)
def test_a_full_queue_refuses_at_once(pool: ThreadPoolExecutor, limit: dict[str, int], reason: str):
    with HTTPServer(http_config(**limit)) as server:
        server.gate.clear()
        first = pool.submit(server.complete, max_tokens=1)
        server.wait_until(lambda: server.num_requests == 1)
        for refused in (server.complete(), server.chat(stream=True)):
            assert refused.status_code == 503
            assert error_of(refused) == {"type": "Service Unavailable", "param": None, "code": 503}
            assert int(refused.headers["Retry-After"]) >= 1
        server.gate.set()
        assert first.result().status_code == 200
        assert metric(server, "vllm:admission_rejections_total", reason=reason) == 2
        assert server.complete(max_tokens=1).status_code == 200


def test_while_draining_open_requests_finish_and_new_ones_are_refused(pool: ThreadPoolExecutor):
    with HTTPServer() as server:
        server.gate.clear()
        first = pool.submit(server.complete, max_tokens=1)
        server.wait_until(lambda: server.num_requests == 1)
        server.loop.call_soon_threadsafe(server.engine.stop_accepting)
        server.wait_until(lambda: True)
        assert server.complete().status_code == 503
        assert server.client.get("/health").status_code == 503
        server.gate.set()
        assert first.result().status_code == 200


def test_load_counts_requests_in_flight_when_asked_to(server: HTTPServer, pool: ThreadPoolExecutor):
    with HTTPServer(enable_server_load_tracking=True) as counting:
        for one, expected in ((server, 0), (counting, 2)):
            one.gate.clear()
            waiting = [pool.submit(one.complete, max_tokens=1), pool.submit(one.chat, max_tokens=1, stream=True)]
            one.wait_until(lambda one=one: one.num_requests == 2)
            assert one.client.get("/load").json() == {"server_load": expected}
            one.gate.set()
            assert [w.result().status_code for w in waiting] == [200, 200]
            assert one.client.get("/load").json() == {"server_load": 0}


def test_the_priority_header_wins_over_the_body(pool: ThreadPoolExecutor):
    with HTTPServer(http_config(scheduling_policy="priority", max_num_seqs=1)) as server:

        def ask(name: str, header: str, body: int) -> Any:
            headers = {"X-Request-Id": name, "X-Vllm-Priority": header}
            json_ = {"prompt": "x", "max_tokens": 1, "priority": body}
            return pool.submit(server.client.post, "/v1/completions", json=json_, headers=headers)

        server.gate.clear()
        asked = [ask("running", "", 0)]
        server.wait_until(lambda: server.num_requests == 1)
        for count, (name, header, body) in enumerate(
            [("last", "9", -5), ("first", "-9", 5), ("middle", "junk", 1)], start=2
        ):
            asked.append(ask(name, header, body))
            server.wait_until(lambda count=count: server.num_requests == count)
        server.gate.set()
        assert all(a.result().status_code == 200 for a in asked)
        order = [sequence.split("-")[1] for sequence in server.params]
        assert [name for name in order if name != "running"] == ["first", "middle", "last"]


def test_every_route_is_listed(server: HTTPServer):
    listed: dict[str, list[str]] = {}
    for path, methods in routes_of(server.app):
        listed.setdefault(path, []).extend(methods)
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert listed[path] == ["POST"]
    for path in ("/v1/models", "/health", "/version", "/load"):
        assert listed[path] == ["GET"]
    assert listed["/ping"] == ["GET", "POST"]


def test_unexpected_errors_are_logged_and_hidden(server: HTTPServer, monkeypatch: pytest.MonkeyPatch):
    async def fail(*args: object, **kwargs: object) -> None:
        raise KeyError("a secret")

    monkeypatch.setattr(server.engine, "prepare", fail)
    with logged("vllm_clone.entrypoints.serve.errors") as messages:
        answer = server.complete()
    assert (answer.status_code, error_of(answer)) == (500, DEAD)
    assert "secret" not in answer.text
    (message,) = messages
    assert "a secret" in message


def test_the_http_layer_imports_neither_torch_nor_transformers():
    code = (
        "import sys, vllm_clone.entrypoints.launchers.api_server; "
        "print([m for m in ('torch', 'transformers', 'numpy', 'openai') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
