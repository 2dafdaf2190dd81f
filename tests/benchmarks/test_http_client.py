"""The thin HTTP client, against scripted answers."""

import asyncio
from collections.abc import Callable

import pytest

from vllm_clone.benchmarks.serve.http import Client, HTTPError
from vllm_clone.errors import ConfigError

LENGTH = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\n\r\nhello"


def talk(script: list[bytes | None], ask: Callable[[Client], object]):
    """Run requests against a server whose connections give the answers of the script, in order.

    None closes the connection before an answer; so does the end of an answer that has no length.
    Returns what ``ask`` returns, and how many connections there were.
    """

    async def run():
        connections: list[asyncio.Task[None] | None] = []
        answers = iter(script)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(asyncio.current_task())
            try:
                while await reader.readuntil(b"\r\n\r\n"):
                    answer = next(answers)
                    if answer is None:
                        break
                    writer.write(answer)
                    if answer.startswith(UNTIL_CLOSE[:19]):
                        break
            except asyncio.IncompleteReadError:
                pass
            writer.close()
            await writer.wait_closed()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            try:
                return await ask(client), len(connections)
            finally:
                client.close()
                await asyncio.gather(*connections)

    return asyncio.run(run())


async def fetch_twice(client: Client):
    return [await client.fetch("GET", "/"), await client.fetch("GET", "/")]


@pytest.mark.parametrize("answer", [LENGTH, CHUNKED])
def test_a_connection_is_used_again(answer):
    assert talk([answer, answer], fetch_twice) == ([(200, b"hello")] * 2, 1)


def test_an_answer_may_end_with_its_connection():
    assert talk([UNTIL_CLOSE, LENGTH], fetch_twice) == ([(200, b"hello")] * 2, 2)


def test_a_connection_that_the_server_closes_meanwhile_is_replaced():
    assert talk([LENGTH, None, LENGTH], fetch_twice) == ([(200, b"hello")] * 2, 2)


def test_pieces_come_with_status_and_time():
    async def ask(client: Client):
        got: list[tuple[int, bytes, float]] = []
        status = await client.stream("POST", "/", b"{}", {}, lambda *piece: got.append(piece))
        return status, got

    ((status, reason), got), _ = talk([CHUNKED], ask)
    assert (status, reason) == (200, "OK")
    assert [(s, data) for s, data, _ in got] == [(200, b"hel"), (200, b"lo")]
    assert got[0][2] > 0


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "connection was lost"),
        (b"SMTP ready\r\n\r\n", "malformed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "malformed"),
    ],
)
def test_no_whole_answer_is_an_error(answer, reason):
    async def ask(client: Client):
        with pytest.raises(HTTPError, match=reason):
            await client.fetch("GET", "/")

    talk([answer], ask)


def test_nobody_there_is_an_error(unused_port):
    async def ask():
        with pytest.raises(HTTPError, match="cannot connect"):
            await Client(f"http://127.0.0.1:{unused_port}").fetch("GET", "/")

    asyncio.run(ask())


@pytest.fixture
def unused_port():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        yield s.getsockname()[1]  # bound, but nobody listens


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://", "https:///v1"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match="--base-url"):
        Client(url)
