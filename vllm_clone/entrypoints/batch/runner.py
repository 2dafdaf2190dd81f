"""Sends the lines of a batch through the server's own application, so many at a time."""

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import httpx

from vllm_clone.entrypoints.batch.lines import Line, LineError, answered, parse

READ_AHEAD = 64
"""Lines read at once from a file."""


@dataclass(slots=True)
class Tally:
    """Counts of one run."""

    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    """Answered by an earlier run."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    def line(self) -> str:
        """The summary."""
        kept = f", {self.skipped} were there already" if self.skipped else ""
        rate = (self.prompt_tokens + self.completion_tokens) / self.seconds if self.seconds else 0.0
        return (
            f"Batch done: {self.succeeded} succeeded, {self.failed} failed{kept}; {self.prompt_tokens} prompt tokens, "
            f"{self.completion_tokens} generated tokens in {self.seconds:.1f} s ({rate:.1f} tokens/s)"
        )


class Sink(Protocol):
    """Where answers go."""

    @property
    def done(self) -> set[str]: ...
    def write(self, line: bytes) -> None: ...


class BatchRunner:
    """Runs a batch.

    Args:
        app: the ASGI application.
        sink: gets each answer as soon as it is there.
        window: requests under way at a time; no more lines than that and :data:`READ_AHEAD` are in memory.
        alive: whether the engine lives. What it answers when it does not is nobody's answer and is not kept.
        on_answer: called after each line that was answered or skipped.
    """

    def __init__(
        self,
        app: Any,
        sink: Sink,
        window: int,
        alive: Callable[[], bool],
        on_answer: Callable[[Tally], None] = lambda tally: None,
    ) -> None:
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://batch", timeout=None
        )
        self._sink = sink
        self._free = asyncio.Semaphore(window)
        self._alive = alive
        self._on_answer = on_answer
        self.tally = Tally()

    async def run(self, lines: Iterable[Line], *, read_ahead: int = READ_AHEAD) -> None:
        """Answer every line. Returns early when the engine dies; cancelling it gives up what is under way.

        Raises:
            OSError: the input cannot be read, or the output not be written.
        """
        begun = time.monotonic()
        tasks: set[asyncio.Task[None]] = set()
        source = iter(lines)
        try:
            while self._alive() and (some := await asyncio.to_thread(_take, source, read_ahead)):
                for line in some:
                    if line.id in self._sink.done:
                        self.tally.skipped += 1
                        self._on_answer(self.tally)
                        continue
                    await self._free.acquire()
                    for task in [t for t in tasks if t.done()]:
                        tasks.discard(task)
                        task.result()
                    tasks.add(asyncio.create_task(self._one(line)))
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.tally.seconds = time.monotonic() - begun
            await self._client.aclose()

    async def _one(self, line: Line) -> None:
        try:
            try:
                request = parse(line)
            except LineError as error:
                self._keep(answered(line, error.custom_id, 400, None, str(error)), ok=False)
                return
            response = await self._client.post(request.url, json=request.body)
            if not self._alive():
                return
            ok = response.status_code == 200
            value = _json(response)
            if ok and isinstance(usage := value.get("usage"), dict):
                self.tally.prompt_tokens += usage.get("prompt_tokens") or 0
                self.tally.completion_tokens += usage.get("completion_tokens") or 0
            body, error_value = (value, None) if ok else (None, value)
            self._keep(answered(line, request.custom_id, response.status_code, body, error_value), ok=ok)
        finally:
            self._free.release()

    def _keep(self, answer: bytes, *, ok: bool) -> None:
        self._sink.write(answer)
        if ok:
            self.tally.succeeded += 1
        else:
            self.tally.failed += 1
        self._on_answer(self.tally)


def _take(source: Any, count: int) -> list[Line]:
    return list(itertools.islice(source, count))


def _json(response: httpx.Response) -> Any:
    try:
        return json.loads(response.content)
    except ValueError:
        return response.text
