"""A server that speaks what `vllm bench serve` speaks, keeps its connections open, and can fail.

It runs in a thread; as a program, ``fake_server PORT [--delay SECONDS] [--fail-after COUNT]``, in its process.
"""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any


class FakeServer(ThreadingHTTPServer):
    """What it answers may be changed at any time; ``asked`` holds (path, body, headers) of each POST."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.lock = Lock()
        self.asked: list[tuple[str, dict[str, Any], dict[str, str]]] = []
        self.failures: list[tuple[int, str]] = []
        """(status, message) of the next generations."""
        self.statuses: dict[str, int] = {}
        """Path → status that it always has."""
        self.reports_usage = True
        self.root = ""
        self.extra_tokens = 0
        """How many more than words /tokenize finds."""
        self.metrics: list[str] = []
        """Texts of the next /metrics, the last one for all later ones."""
        self.running = self.most_running = 0
        self.delay = 0.0
        """Seconds before each event but the first."""
        self.fail_after: int | None = None
        """Generations after which all fail."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def generations(self) -> list[dict[str, Any]]:
        return [body for path, body, _ in self.asked if path.startswith(("/v1/", "/generate"))]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def do_GET(self) -> None:
        fake = self.server
        if self.path == "/v1/models" and self.path not in fake.statuses:
            self._send(200, {"data": [{"id": "served", "root": fake.root or "served"}]})
        elif self.path == "/health":
            self._send(200, {})
        elif self.path == "/metrics" and fake.metrics:
            text = fake.metrics.pop(0) if len(fake.metrics) > 1 else fake.metrics[0]
            self._send_bytes(200, text.encode())
        else:
            self._send(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        fake = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        with fake.lock:
            fake.asked.append((self.path, body, dict(self.headers)))
            failure = fake.failures.pop(0) if fake.failures and self.path.startswith("/v1/") else None
            if fake.fail_after is not None and len(fake.asked) > fake.fail_after:
                failure = (503, "")
        if self.path in fake.statuses:
            self._send(fake.statuses[self.path], {"detail": "no"})
        elif failure is not None:
            self._send(failure[0], {"error": {"message": failure[1]}})
        else:
            self._answer(body)

    def _answer(self, body: dict[str, Any]) -> None:
        if self.path == "/tokenize":
            words = body["prompt"].split()
            ids = list(range(len(words) + self.server.extra_tokens))
            self._send(200, {"count": len(ids), "tokens": ids})
        elif self.path == "/detokenize":
            self._send(200, {"prompt": " ".join(f"t{i}" for i in body["tokens"])})
        elif self.path == "/v1/embeddings":
            self._send(200, {"data": [], "usage": {"prompt_tokens": 9, "total_tokens": 9}})
        elif self.path in ("/start_profile", "/stop_profile"):
            self._send(200, {})
        else:
            self._stream(list(self._events(body)))

    def _events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if self.path == "/v1/responses":
            count = body["max_output_tokens"]
            for _ in range(count):
                yield {"type": "response.output_text.delta", "delta": " w"}
            usage = {"input_tokens": 7, "output_tokens": count}
            yield {"type": "response.completed", "response": {"usage": usage}}
            return
        if self.path == "/generate_stream":
            count = body["parameters"]["max_new_tokens"]
            for i in range(count):
                details = {"generated_tokens": count} if i == count - 1 else None
                yield {"token": {"text": " w", "id": 1}, "details": details}
            return
        is_chat = self.path == "/v1/chat/completions"
        count = body.get("max_tokens") or body.get("max_completion_tokens") or 1
        if is_chat:
            yield {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
        for _ in range(count):
            yield {"choices": [{"delta": {"content": " w"}} if is_chat else {"text": " w"}]}
        if self.server.reports_usage:
            yield {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": count}}

    def _stream(self, events: list[dict[str, Any]]) -> None:
        fake = self.server
        with fake.lock:
            fake.running += 1
            fake.most_running = max(fake.most_running, fake.running)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        lines = [": comment", *(f"data: {json.dumps(event)}" for event in events), "data: [DONE]"]
        for i, line in enumerate(lines):
            if i > 1 and fake.delay:
                time.sleep(fake.delay)
            piece = f"{line}\n\n".encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        with fake.lock:
            fake.running -= 1
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: int, body: dict[str, Any]) -> None:
        self._send_bytes(status, json.dumps(body).encode())

    def _send_bytes(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def running() -> Iterator[FakeServer]:
    with FakeServer() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--fail-after", type=int)
    args = parser.parse_args()
    with FakeServer(args.port) as server:
        server.delay, server.fail_after = args.delay, args.fail_after
        server.serve_forever()


if __name__ == "__main__":
    main()
