"""Server-sent events: errors on the way, keep-alive comments, and clients that leave."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import StreamingResponse

from vllm_clone.entrypoints.openai.answers import DONE, event
from vllm_clone.entrypoints.serve.errors import body_of

T = TypeVar("T")

KEEP_ALIVE = b": keep-alive\n\n"


class ClientGone(Exception):
    """The client closed its connection before the answer was ready."""


async def with_errors(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Once the answer has begun, an error is its last event."""
    async with contextlib.aclosing(events) as source:  # type: ignore[type-var]
        try:
            async for piece in source:
                yield piece
        except Exception as error:
            yield event(body_of(error)[1])
            yield DONE


async def kept_alive(events: AsyncIterator[bytes], interval: float) -> AsyncIterator[bytes]:
    """A comment line whenever ``interval`` seconds pass in silence."""
    iterator = events.__aiter__()
    pending: asyncio.Future[bytes] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(iterator.__anext__())
            done, _ = await asyncio.wait([pending], timeout=interval)
            if not done:
                yield KEEP_ALIVE
                continue
            try:
                piece = pending.result()
            except StopAsyncIteration:
                return
            pending = None
            yield piece
    finally:
        if pending is not None:
            pending.cancel()
            with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration):
                await pending
        await events.aclose()  # type: ignore[attr-defined]


def sse(events: AsyncIterator[bytes], keep_alive: float) -> StreamingResponse:
    """The streaming answer; closing it (a client that left) closes ``events`` and so aborts the request."""
    guarded = with_errors(events)
    body = kept_alive(guarded, keep_alive) if keep_alive else guarded
    return StreamingResponse(_closing(body), media_type="text/event-stream")


async def _closing(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(body) as source:  # type: ignore[type-var]
        async for piece in source:
            yield piece


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """``work``'s result; cancelled when the client leaves first.

    Raises:
        ClientGone: nobody is there to answer.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([task, watcher], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for future in (task, watcher):
            future.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
