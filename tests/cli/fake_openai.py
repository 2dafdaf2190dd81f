"""A tiny server that speaks just enough of the OpenAI API for the clients, and remembers what it was asked."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class FakeOpenAI(ThreadingHTTPServer):
    """What the next answers are may be changed at any time."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models = ["first", "second"]
        self.deltas: list[dict[str, Any]] = [{"content": "Hello"}, {"content": " there"}]
        """Chat: one chunk each."""
        self.texts = ["Hello", " there"]
        """Completions: one chunk each."""
        self.completion_tokens = 2
        self.failures: list[tuple[int, str]] = []
        """(HTTP status, message) of the next requests for an answer."""
        self.page: str | None = None
        """What every GET gets instead of the list of models."""
        self.stream_end = "data: [DONE]\n\n"
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _Handler(BaseHTTPRequestHandler):
    server: FakeOpenAI

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        if self.server.page is not None:
            self._send(200, "text/html" if "<" in self.server.page else "application/json", self.server.page)
            return
        self._send_json(200, {"object": "list", "data": [{"id": m, "object": "model"} for m in self.server.models]})

    def do_POST(self) -> None:
        fake = self.server
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        fake.asked.append(asked)
        fake.keys.append(self.headers["Authorization"])
        if fake.failures:
            status, message = fake.failures.pop(0)
            self._send_json(status, {"error": {"message": message, "type": "x", "param": None, "code": status}})
            return
        if self.path == "/v1/chat/completions":
            choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in fake.deltas]
        else:
            choices = [{"index": 0, "text": text, "finish_reason": None} for text in fake.texts]
        chunks: list[dict[str, Any]] = [{"choices": [choice]} for choice in choices]
        if asked.get("stream_options", {}).get("include_usage"):
            n = fake.completion_tokens
            usage = {"prompt_tokens": 1, "completion_tokens": n, "total_tokens": n + 1}
            chunks.append({"choices": [], "usage": usage})
        common = {"id": "x", "object": "chunk", "created": 0, "model": asked["model"]}
        lines = [f"data: {json.dumps(common | chunk)}\n\n" for chunk in chunks]
        self._send(200, "text/event-stream", "".join(lines) + fake.stream_end)

    def _send_json(self, status: int, body: dict[str, Any]) -> None:
        self._send(status, "application/json", json.dumps(body))

    def _send(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def running() -> Iterator[FakeOpenAI]:
    with FakeOpenAI() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
