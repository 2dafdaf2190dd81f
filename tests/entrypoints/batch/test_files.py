"""Lines in, results out, and going on with a file that a killed run left."""

import io

import pytest

from vllm_clone.entrypoints.batch import files
from vllm_clone.entrypoints.batch.files import ResultFile, lines_of, opened_input
from vllm_clone.errors import ConfigError

FIRST = b'{"custom_id": "a"}\n'


def result(file: ResultFile, number: int) -> bytes:
    return b'{"id":"%s","custom_id":null}' % file.id_of(number).encode()


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "out.jsonl"
    file = ResultFile(str(path), resume=False)
    file.begin(FIRST)
    for number in (0, 9):
        file.write(result(file, number))
    file.close()
    return path


def test_a_resumed_file_knows_its_lines_and_loses_a_torn_one(path):
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id":"vllm-00')
    file = ResultFile(str(path), resume=True)
    file.begin(FIRST)
    assert [n for n in range(40) if file.has(n)] == [0, 9]
    assert file.num_kept == 2
    file.write(result(file, 3))
    file.close()
    assert path.read_bytes() == whole + result(file, 3) + b"\n"


def test_without_resume_old_results_go(path):
    ResultFile(str(path), resume=False).close()
    assert path.read_bytes() == b""


def test_results_of_another_input_are_refused(path):
    file = ResultFile(str(path), resume=True)
    with pytest.raises(ConfigError, match="results of another input"):
        file.begin(b"other")
    file.close()


def test_a_file_that_holds_something_else_is_refused_and_kept(path):
    path.write_bytes(b"precious\n")
    with pytest.raises(ConfigError, match="holds lines of something else"):
        ResultFile(str(path), resume=True)
    assert path.read_bytes() == b"precious\n"


def test_a_file_that_another_run_writes_is_refused(path):
    file = ResultFile(str(path), resume=True)
    with pytest.raises(ConfigError, match="another run writes it"):
        ResultFile(str(path), resume=False)
    file.close()
    assert path.stat().st_size > 0


def test_a_line_of_any_length_is_one_line(monkeypatch):
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 4)
    lines = list(lines_of(io.BytesIO(b"\xef\xbb\xbfa\n" + b"x" * 50 + b"\n\nlast")))
    assert [number for number, _ in lines] == [0, 1, 2, 3]
    assert [line for _, line in lines] == [b"a\n", b"xxxxx", b"\n", b"last"]


def test_a_missing_input_is_named(tmp_path):
    with pytest.raises(OSError, match=r"nosuch\.jsonl"), opened_input(str(tmp_path / "nosuch.jsonl")):
        pass
