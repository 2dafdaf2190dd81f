"""Sends one sample and times its answer."""

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from vllm_clone.benchmarks.serve.backends import Backend, Event, error_message, reply_prompt_len
from vllm_clone.benchmarks.serve.http import Client, HTTPError
from vllm_clone.benchmarks.serve.sample import Outcome, Sample

_encode = msgspec.json.Encoder().encode
MAX_ERROR_BYTES = 1 << 16
"""Of the body of an error; the rest is not kept."""


class _StreamReader:
    """Splits a body of server-sent events and keeps what the figures need."""

    def __init__(self, backend: Backend, outcome: Outcome, counter: "TokenCounter") -> None:
        assert backend.read is not None
        self._read = backend.read
        self._outcome = outcome
        self._counter = counter
        self._rest = b""
        self._last = 0.0
        self._texts: list[str] = []
        self.failed_body = b""
        self.error = ""
        self.ended = not backend.needs_end
        self.output_len: int | None = None

    def __call__(self, status: int, data: bytes, now: float) -> None:
        if status != 200:
            self.failed_body = (self.failed_body + data)[:MAX_ERROR_BYTES]
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (payload := line[5:].strip()) != b"[DONE]":
                try:
                    event = self._read(payload)
                except msgspec.MsgspecError as error:
                    event = Event(error=f"an event is no valid JSON of this protocol: {error}")
                self._take(event, now)

    def _take(self, event: Event, now: float) -> None:
        outcome = self._outcome
        if event.has_token:
            if self._last:
                outcome.gaps.append(now - self._last)
            else:
                outcome.ttft = now - outcome.start
            self._last = now
            self._counter.tokens += 1
            if event.text:
                self._texts.append(event.text)
        if event.output_len is not None:
            self.output_len = event.output_len
        if event.prompt_len is not None:
            outcome.prompt_len = event.prompt_len
        self.ended |= event.is_end
        self.error = self.error or event.error or ""

    @property
    def has_tokens(self) -> bool:
        return self._last > 0

    @property
    def last(self) -> float:
        """When the last token arrived."""
        return self._last

    def text(self) -> str:
        return "".join(self._texts)


class TokenCounter:
    """Tokens that have arrived, over all requests; what the progress bar shows."""

    def __init__(self) -> None:
        self.tokens = 0


class Sender:
    """Sends samples to one endpoint.

    Args:
        extra_body: fields of every request: sampling parameters, then what the user adds.
        tokenizer: counts output tokens when the server does not; without one such an output counts as 1.
        keep_texts: keep generated texts in the outcomes.
    """

    def __init__(
        self,
        client: Client,
        backend: Backend,
        endpoint: str,
        *,
        extra_body: Mapping[str, Any] = {},
        logprobs: int | None = None,
        tokenizer: Any = None,
        keep_texts: bool = False,
    ) -> None:
        self.counter = TokenCounter()
        self._client = client
        self._backend = backend
        self._endpoint = endpoint
        self._extra_body = extra_body
        self._logprobs = logprobs
        self._tokenizer = tokenizer
        self._keep_texts = keep_texts

    async def send(self, sample: Sample, model: str, request_id: str | None = None) -> Outcome:
        """Send a sample and wait for the end of its answer; failures are in the outcome."""
        body = {"model": model, **self._backend.body(sample, self._logprobs), **self._extra_body, **sample.extra_body}
        payload = _encode(body)
        headers = {} if request_id is None else {"x-request-id": request_id}
        outcome = Outcome(sample.prompt_len)
        outcome.start = time.perf_counter()
        try:
            if self._backend.generates:
                await self._generate(payload, headers, outcome)
            else:
                await self._reply(payload, headers, outcome)
        except HTTPError as error:
            outcome.error = str(error)
        return outcome

    async def _generate(self, payload: bytes, headers: Mapping[str, str], outcome: Outcome) -> None:
        reader = _StreamReader(self._backend, outcome, self.counter)
        status, reason = await self._client.stream("POST", self._endpoint, payload, headers, reader)
        if status != 200:
            outcome.error = _explained(reason or str(status), reader.failed_body)
        elif reader.error:
            outcome.error = reader.error
        elif not reader.has_tokens:
            outcome.error = "The answer has no token."
        elif not reader.ended:
            outcome.error = "The stream broke off before its closing event."
        else:
            outcome.success = True
            outcome.latency = reader.last - outcome.start
            outcome.output_len = self._count(reader)
        if self._keep_texts:
            outcome.text = reader.text()

    def _count(self, reader: _StreamReader) -> int:
        if reader.output_len is not None:
            return reader.output_len
        return 1 if self._tokenizer is None else len(self._tokenizer.encode(reader.text(), add_special_tokens=False))

    async def _reply(self, payload: bytes, headers: Mapping[str, str], outcome: Outcome) -> None:
        pieces: list[bytes] = []
        status, reason = await self._client.stream(
            "POST", self._endpoint, payload, headers, lambda _, piece, __: pieces.append(piece)
        )
        body = b"".join(pieces)
        if status != 200:
            outcome.error = _explained(reason or str(status), body)
            return
        outcome.latency = outcome.ttft = time.perf_counter() - outcome.start
        outcome.success = True
        outcome.prompt_len = reply_prompt_len(body) or outcome.prompt_len


def _explained(reason: str, body: bytes) -> str:
    message = error_message(body)
    return f"{reason}: {message}" if message else reason
