"""Commands of the servers that are measured, starting and stopping them, and what their processes hold in memory."""

import os
import shlex
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

STOP_SECONDS = 20.0
POLL_SECONDS = 0.02
KV_GIB = 1
"""GiB of KV cache that servers get which are told in bytes."""
SPARE_TOKENS = 64
"""Of a context, beyond the longest request."""


@dataclass(frozen=True)
class Room:
    """What a server must hold: tokens of the longest request, and requests at a time."""

    longest: int
    requests: int

    @property
    def context(self) -> int:
        return self.longest + SPARE_TOKENS


def cores() -> int:
    return len(os.sched_getaffinity(0))


def ours(program: str, model: str, name: str, room: Room) -> str:
    return (
        f"{program} serve {model} --port {{port}} --served-model-name {name} --max-model-len {room.context} "
        f"--max-num-seqs {room.requests} --kv-cache-memory-bytes {KV_GIB << 30}"
    )


def vllm(program: str, model: str, name: str, room: Room) -> str:
    """vLLM leaves a core free unless it is told not to."""
    variables = f"VLLM_CPU_KVCACHE_SPACE={KV_GIB} VLLM_CPU_NUM_OF_RESERVED_CPU=0"
    return (
        f"env {variables} {program} serve {model} --port {{port}} --served-model-name {name} "
        f"--max-model-len {room.context} --max-num-seqs {room.requests}"
    )


def llama_server(program: str, model: str, name: str, room: Room) -> str:
    """llama.cpp's server splits its context evenly among its slots."""
    return (
        f"{program} -m {model} --port {{port}} -a {name} -c {room.context * room.requests} -np {room.requests} "
        f"-t {cores()} -tb {cores()}"
    )


COMMANDS: dict[str, Callable[[str, str, str, Room], str]] = {"ours": ours, "vllm": vllm, "llama.cpp": llama_server}
"""Server → command line out of its program, the model, the name to serve it by, and the room it needs."""


@dataclass
class Server:
    """A running server and how long it took to be ready."""

    name: str
    process: subprocess.Popen[bytes]
    port: int
    start_seconds: float

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def memory_bytes(self) -> int:
        """Of all its processes: proportional set size where it can be read, else resident size."""
        root = psutil.Process(self.process.pid)
        family = [root, *root.children(recursive=True)]
        try:
            return sum(p.memory_full_info().pss for p in family)
        except (psutil.AccessDenied, AttributeError):
            return sum(p.memory_info().rss for p in family)

    def stop(self) -> None:
        """End the whole process group."""
        for sig, patience in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, None)):
            if self.process.poll() is None:
                os.killpg(self.process.pid, sig)
                try:
                    self.process.wait(patience)
                except subprocess.TimeoutExpired:
                    continue
            return


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start(name: str, command: str, log: Path, patience: float) -> Server:
    """Start a server and wait until /health says 200. ``{port}`` in the command becomes a free port.

    Raises:
        SystemExit: it ended, or was not ready in time.
    """
    port = free_port()
    begun = time.perf_counter()
    with log.open("wb") as out:
        words = shlex.split(command.replace("{port}", str(port)))
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    server = Server(name, process, port, 0.0)
    try:
        while time.perf_counter() - begun < patience:
            if process.poll() is not None:
                raise SystemExit(f"{name} ended with {process.returncode}; its log is {log}")
            if _is_healthy(server.url):
                server.start_seconds = time.perf_counter() - begun
                return server
            time.sleep(POLL_SECONDS)
        raise SystemExit(f"{name} was not ready in {patience:g} s; its log is {log}")
    except BaseException:  # a Ctrl-C too must leave no server behind
        server.stop()
        raise


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
