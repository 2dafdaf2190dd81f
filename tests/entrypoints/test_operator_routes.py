"""Routes that an operator switches on."""

from collections.abc import Iterator

import pytest

from tests.entrypoints.http_server import HTTPServer, ScriptedExecutor, http_config


class Workers:
    """Answers calls by name in place of workers."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __call__(self, method: str, args: list[object] = [], kwargs: dict[str, object] | None = None) -> list[object]:  # noqa: B006
        self.calls.append((method, list(args), kwargs or {}))
        if method == "fail":
            raise ValueError("it failed")
        return [len(self.calls)]


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    made = Workers()
    monkeypatch.setattr(ScriptedExecutor, "collective_rpc", lambda self, *args: made(*args))
    return made


@pytest.fixture
def dev_server(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    profiler = {"profiler": "torch", "torch_profiler_dir": "unused"}
    with HTTPServer(http_config(profiler_config=profiler)) as server:
        yield server


def test_profiles_are_started_and_stopped(dev_server: HTTPServer, workers: Workers) -> None:
    assert dev_server.client.post("/start_profile").status_code == 200
    assert dev_server.client.post("/stop_profile").status_code == 200
    assert workers.calls == [("profile", [True], {}), ("profile", [False], {})]


def test_workers_can_be_called_by_name_in_development(dev_server: HTTPServer, workers: Workers) -> None:
    answer = dev_server.client.post("/collective_rpc", json={"method": "count", "args": [1], "kwargs": {"a": 2}})
    assert answer.json() == {"results": [1]}
    assert workers.calls == [("count", [1], {"a": 2})]
    failed = dev_server.client.post("/collective_rpc", json={"method": "fail"})
    assert failed.status_code == 400
    assert "it failed" in failed.json()["error"]["message"]
    assert dev_server.client.post("/collective_rpc", json={}).status_code == 400


def test_without_the_flags_there_are_no_such_routes(server: HTTPServer) -> None:
    for path in ("/start_profile", "/stop_profile", "/collective_rpc"):
        assert server.client.post(path, json={"method": "count"}).status_code == 404


def test_offline_docs_fetch_nothing_from_elsewhere() -> None:
    with HTTPServer(enable_offline_docs=True) as server:
        page = server.client.get("/docs")
        assert page.headers["content-type"].startswith("text/html")
        assert "openapi.json" in page.text
        assert "http" not in page.text.replace("http-equiv", "")
        assert server.client.get("/redoc").status_code == 404
        assert server.client.get("/openapi.json").json()["paths"]
