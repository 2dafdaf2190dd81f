"""Server-sent events and the merging of several generators, with generators whose timing the test owns."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any

import pytest

from vllm_clone.entrypoints.openai.answers import DONE
from vllm_clone.entrypoints.openai.serving import merged
from vllm_clone.entrypoints.serve.streaming import KEEP_ALIVE, ClientGone, kept_alive, unless_gone, with_errors
from vllm_clone.errors import EngineDeadError, RequestError


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(10):
            return await coroutine

    return asyncio.run(bounded())


class Source:
    """A generator that can be seen closing. ``items``: what it yields; an Event is awaited, an exception raised."""

    def __init__(self, *items: Any) -> None:
        self.items = items
        self.closed = False

    async def __call__(self) -> AsyncGenerator[Any, None]:
        try:
            for item in self.items:
                if isinstance(item, asyncio.Event):
                    await item.wait()
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield item
        finally:
            self.closed = True


async def collect(source: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in source]


@pytest.mark.parametrize("count", [1, 3])
def test_merging_loses_nothing_and_keeps_each_ones_order(count: int) -> None:
    async def go() -> None:
        sources = [Source(*range(200)) for _ in range(count)]
        got = await collect(merged([s() for s in sources]))
        for number in range(count):
            assert [item for n, item in got if n == number] == list(range(200))
        assert all(s.closed for s in sources)

    run(go())


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("error", [RequestError("r"), EngineDeadError(), KeyError("unforeseen")], ids=repr)
def test_an_error_of_one_ends_all(count: int, error: Exception) -> None:
    async def go() -> None:
        never = asyncio.Event()
        sources = [Source(1, error), Source(1, never)][:count]
        with pytest.raises(type(error)):
            await collect(merged([s() for s in sources]))
        assert all(s.closed for s in sources)

    run(go())


@pytest.mark.parametrize("count", [1, 2])
def test_closing_the_merge_closes_what_is_merged(count: int) -> None:
    async def go() -> None:
        never = asyncio.Event()
        sources = [Source(1, never) for _ in range(count)]
        merge = merged([s() for s in sources])
        assert (await anext(merge))[1] == 1
        await merge.aclose()  # type: ignore[attr-defined]
        assert all(s.closed for s in sources[:1])
        assert all(s.closed for s in sources)

    run(go())


def test_an_error_becomes_the_last_event() -> None:
    *events, last, done = run(collect(with_errors(Source(b"data: 1\n\n", RequestError("why", param="n"))())))
    assert events == [b"data: 1\n\n"]
    assert last.startswith(b'data: {"error":{"message":"why (parameter=n)","type":"BadRequestError","param":"n"')
    assert done == DONE


def test_silence_is_filled_until_the_next_event() -> None:
    async def go() -> None:
        news = asyncio.Event()
        source = Source(b"a", news, b"b")
        events = kept_alive(source(), 0.01)
        assert await anext(events) == b"a"
        assert await anext(events) == KEEP_ALIVE
        assert await anext(events) == KEEP_ALIVE
        news.set()
        rest = await collect(events)
        assert rest[-1] == b"b"
        assert set(rest[:-1]) <= {KEEP_ALIVE}
        assert source.closed

    run(go())


def test_closing_a_silent_stream_closes_its_source() -> None:
    async def go() -> None:
        source = Source(b"a", asyncio.Event())
        events = kept_alive(source(), 0.01)
        assert [await anext(events), await anext(events)] == [b"a", KEEP_ALIVE]
        await events.aclose()  # type: ignore[attr-defined]
        assert source.closed

    run(go())


class Connection:
    """A request whose client leaves when told to."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.left.wait()
        return {"type": "http.disconnect"}


def test_work_for_a_client_that_left_is_cancelled() -> None:
    async def go() -> None:
        connection, cancelled = Connection(), asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        connection.left.set()
        with pytest.raises(ClientGone):
            await unless_gone(connection, work())  # type: ignore[arg-type]
        assert cancelled.is_set()

    run(go())


def test_work_for_a_client_that_stays_is_answered_or_fails_as_it_does() -> None:
    async def give(value: int) -> int:
        return value

    async def fail() -> None:
        raise RequestError("no")

    async def go() -> None:
        assert await unless_gone(Connection(), give(3)) == 3  # type: ignore[arg-type]
        with pytest.raises(RequestError):
            await unless_gone(Connection(), fail())  # type: ignore[arg-type]

    run(go())
