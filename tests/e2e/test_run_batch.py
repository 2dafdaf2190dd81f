"""`vllm run-batch` as a user runs it: answers of every kind, kill -9, resume."""

import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

COMMAND = [sys.executable, "-m", "vllm_clone.entrypoints.cli.main", "run-batch"]
ARGS = ("--served-model-name", "toy", "--max-model-len", "512", "--kv-cache-memory-bytes", "16M")


def start(model: Path, source: object, output: object, *args: str, **options: object) -> "subprocess.Popen[bytes]":
    words = [*COMMAND, "-i", str(source), "-o", str(output), "--model", str(model), *ARGS, *args]
    return subprocess.Popen(words, stderr=subprocess.PIPE, start_new_session=True, **options)  # type: ignore[call-overload,no-any-return]


def finish(process: "subprocess.Popen[bytes]") -> tuple[int, str]:
    _, stderr = process.communicate(timeout=120)
    return process.returncode, stderr.decode()


def request(number: int, **body: object) -> str:
    whole = {"model": "toy", "prompt": f"Line {number}", "max_tokens": 5, "ignore_eos": True, **body}
    return json.dumps({"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": whole})


def answers(path: Path) -> list[dict[str, object]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_each_line_gets_its_own_answer(toy_model, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"model": "toy", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "ignore_eos": True}
    lines = [
        request(0), "", "{not json", request(1, model="other"), request(2, temperature=-3),
        json.dumps({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat}),
        json.dumps({"custom_id": "count", "method": "POST", "url": "/tokenize", "body": {"prompt": "a b"}}),
    ]  # fmt: skip
    source.write_text("\n".join(lines))
    code, stderr = finish(start(toy_model, source, output))
    assert code == 0
    assert "3 succeeded, 3 failed" in stderr
    by_id = {answer["custom_id"]: answer for answer in answers(output)}
    assert {k: v["response"]["status_code"] for k, v in by_id.items()} == {
        "r0": 200, None: 400, "r1": 404, "r2": 400, "chat": 200, "count": 200,
    }  # fmt: skip
    assert by_id["r0"]["response"]["body"]["usage"]["completion_tokens"] == 5
    assert by_id["r0"]["error"] is None
    assert by_id["r1"]["error"]["error"]["type"] == "NotFoundError"
    assert by_id["r1"]["response"]["body"] is None
    assert "Line 3 is no JSON" in by_id[None]["error"]


def test_kill_and_resume_answers_every_line_once(toy_model, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    count = 400
    source.write_text("\n".join("{torn" if n % 100 == 7 else request(n, max_tokens=20) for n in range(count)))
    for wanted in (40, 150):
        process = start(toy_model, source, output, *(["--resume"] if output.exists() else []))
        deadline = time.monotonic() + 60
        while not output.exists() or output.read_bytes().count(b"\n") < wanted:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        assert output.read_bytes().count(b"\n") < count
    with output.open("ab") as file:
        file.write(b'{"id": "vllm-torn')
    code, stderr = finish(start(toy_model, source, output, "--resume"))
    assert code == 0
    assert "were there already" in stderr
    found = answers(output)
    assert len(found) == count
    assert len({a["id"] for a in found}) == count
    names = Counter(a["custom_id"] for a in found)
    assert names.pop(None) == count // 100
    assert set(names.values()) == {1}


def test_pipes_and_urls(toy_model, tmp_path):
    received: dict[str, bytes] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(request(1).encode())

        def do_PUT(self) -> None:
            received[self.path] = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(201)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert finish(start(toy_model, url + "/in", url + "/out"))[0] == 0
        assert json.loads(received["/out"])["custom_id"] == "r1"
    finally:
        server.shutdown()
        server.server_close()
    process = start(toy_model, "-", "-", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    stdout, _ = process.communicate(request(2).encode(), timeout=60)
    assert process.returncode == 0
    assert json.loads(stdout)["custom_id"] == "r2"


def test_a_signal_keeps_what_is_answered(toy_model, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(request(n, max_tokens=400) for n in range(300)))
    process = start(toy_model, source, output)
    deadline = time.monotonic() + 60
    while not output.exists() or not output.read_bytes():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    code, stderr = finish(process)
    assert code == 130
    assert "--resume" in stderr
    assert all(answer["error"] is None for answer in answers(output))


def test_metrics_are_served_while_a_batch_runs(toy_model, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(request(n, max_tokens=100) for n in range(300)))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    metrics = ("--enable-metrics", "--host", "127.0.0.1", "--port", str(port), "--kv-cache-metrics")
    process = start(toy_model, source, output, *metrics, "--enable-mfu-metrics")
    deadline = time.monotonic() + 60
    while not output.exists() or not output.read_bytes():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    text = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    code, stderr = finish(process)
    assert code == 0, stderr
    assert "Traceback" not in stderr
    found = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if "model_name" in line}
    assert found["vllm:generation_tokens_total"] > 0
    assert found["vllm:estimated_flops_per_gpu_total"] > 0
    assert "vllm:kv_block_lifetime_seconds_count" in found


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("-i", "no/such.jsonl", "-o", "{tmp}/out"), 1, "No such file or directory: 'no/such.jsonl'"),
        (("-o", "{tmp}/out"), 2, "-i/--input-file is needed"),
        (("-i", "{tmp}/x", "-o", "{tmp}/x"), 2, "is the input"),
        (("-i", "-", "-o", "-", "--resume"), 2, "keeps nothing of an earlier run"),
        (("-i", "-", "-o", "-", "--port", "9"), 2, "give --enable-metrics too"),
        (
            ("-i", "-", "-o", "-", "--kv-cache-metrics"),
            2,
            "--kv-cache-metrics: shows in metrics; give --enable-metrics",
        ),
        (("-i", "-", "-o", "-", "--cudagraph-metrics"), 2, "a batch writes no statistics line"),
        (("-i", "-", "-o", "-", "--enable-metrics", "--disable-log-stats"), 2, "--enable-metrics: shows statistics"),
        (("-i", "-", "-o", "-", "--ssl-keyfile", "k"), 2, "unknown flag --ssl-keyfile"),
    ],
)
def test_a_wrong_command_line_is_one_line(toy_model, tmp_path, args, code, message):
    words = [*COMMAND, *(a.format(tmp=tmp_path) for a in args), "--model", str(toy_model)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
