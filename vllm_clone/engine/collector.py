"""Between the output processor and a slow consumer: at most one pending output per request, merged as more come."""

import asyncio

from vllm_clone.outputs import CompletionOutput, RequestOutput


def merge(old: RequestOutput, new: RequestOutput, delta: bool) -> RequestOutput:
    """One output that says what ``old`` and then ``new`` said.

    Sequences present in both are joined when outputs are deltas, otherwise the newer stands for both.
    """
    by_index: dict[int, CompletionOutput] = {output.index: output for output in old.outputs}
    for output in new.outputs:
        before = by_index.get(output.index)
        if delta and before is not None:
            output = _join(before, output)
        by_index[output.index] = output
    new.outputs = [by_index[index] for index in sorted(by_index)]
    if new.prompt_logprobs is None:
        new.prompt_logprobs = old.prompt_logprobs
    return new


def _join(a: CompletionOutput, b: CompletionOutput) -> CompletionOutput:
    logprobs = a.logprobs if b.logprobs is None else (a.logprobs or []) + b.logprobs
    return CompletionOutput(
        a.index,
        a.text + b.text,
        a.token_ids + b.token_ids,
        b.cumulative_logprob,
        logprobs,
        b.finish_reason,
        b.stop_reason,
    )


class Collector:
    """Where one consumer waits for its request's outputs. One consumer, one event loop."""

    def __init__(self, delta: bool) -> None:
        self._delta = delta
        self._pending: RequestOutput | Exception | None = None
        self._news = asyncio.Event()

    def put(self, item: RequestOutput | Exception) -> None:
        """Add an output; an exception replaces whatever is pending and stays the last word."""
        if isinstance(self._pending, Exception):
            return
        if isinstance(self._pending, RequestOutput) and isinstance(item, RequestOutput):
            item = merge(self._pending, item, self._delta)
        self._pending = item
        self._news.set()

    async def get(self) -> RequestOutput:
        """The pending output, as soon as there is one. Raises an exception that was put."""
        while self._pending is None:
            await self._news.wait()
        item, self._pending = self._pending, None
        self._news.clear()
        if isinstance(item, Exception):
            raise item
        return item
