"""Command lines and how they end."""

import pytest

from vllm_clone.entrypoints.cli.main import main


@pytest.fixture
def fails(capsys):
    """The error line and exit code of a command line that must fail in one line on stderr."""

    def run(*argv: str) -> tuple[str, int]:
        code = main(argv)
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("vllm: error: ")
        assert captured.err.count("\n") == 1
        return captured.err.removeprefix("vllm: error: ").strip(), code

    return run
