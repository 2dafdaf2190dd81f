"""One plain server per test module, with the flags of the first recorded one (whose CORS default was none)."""

from collections.abc import Iterator

import pytest

from tests.entrypoints.http_server import HTTPServer


@pytest.fixture(scope="module")
def server() -> Iterator[HTTPServer]:
    with HTTPServer(enable_prompt_tokens_details=True, allowed_origins=[]) as running:
        yield running


@pytest.fixture(autouse=True)
def no_script(request: pytest.FixtureRequest) -> None:
    if "server" in request.fixturenames:
        running = request.getfixturevalue("server")
        running.script, running.choices_per_prompt = [], 1
