"""Lines of a batch: read, refused, written, resumed."""

import io
import json

import httpx
import pytest

from vllm_clone.entrypoints.batch import lines
from vllm_clone.entrypoints.batch.lines import Input, Line, LineError, Output, answered, parse
from vllm_clone.errors import ConfigError

GOOD = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}


def line(**changes: object) -> Line:
    return Line(3, json.dumps({k: v for k, v in {**GOOD, **changes}.items() if v is not None}).encode())


def test_a_good_line_says_what_to_send_where():
    request = parse(line(extra="ignored"))
    assert (request.custom_id, request.url, request.body) == ("a", "/v1/completions", {"prompt": "Hi"})


@pytest.mark.parametrize(
    ("bad", "custom_id", "message"),
    [
        (Line(7, b"{not json"), None, "Line 7 is no JSON"),
        (Line(7, b"[1]"), None, "Line 7 must be a JSON object"),
        (Line(7, b"[" * 100_000), None, "Line 7 is no JSON"),
        (Line(7, b"\xff\xfe"), None, "Line 7 is no JSON"),
        (Line(7, b"{}", too_long=True), None, "Line 7 is longer than"),
        (line(custom_id=None), None, "custom_id must be a string"),
        (line(custom_id=5), None, "custom_id must be a string"),
        (line(method=None), "a", "method and url must be strings"),
        (line(body="x"), "a", "body an object"),
        (line(url="/v1/embeddings"), "a", "/v1/embeddings is not supported"),
        (line(url="/v1/completions/../../metrics"), "a", "is not supported"),
        (line(body={"stream": True}), "a", "no streams"),
    ],
)
def test_a_bad_line_says_why(bad, custom_id, message):
    with pytest.raises(LineError, match=message) as caught:
        parse(bad)
    assert caught.value.custom_id == custom_id


def test_input_skips_blank_lines_and_counts_all(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"one\n\n  \r\ntwo\r\nthree")
    source = Input(str(path))
    assert source.count() == 3
    assert [(x.number, x.text) for x in source] == [(1, b"one"), (4, b"two"), (5, b"three")]
    source.close()


def test_a_line_without_end_is_read_by_pieces_and_marked(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 10)
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"x" * 95 + b"\nshort\n" + b"y" * 11)
    source = Input(str(path))
    assert [(x.number, x.too_long) for x in source] == [(1, True), (2, False), (3, True)]
    source.close()


def test_ids_tell_lines_apart_and_stay_the_same():
    ids = {Line(n, text).id for n in (1, 2) for text in (b"a", b"b")}
    assert len(ids) == 4
    assert Line(1, b"a").id in ids


def test_output_overwrites_unless_it_resumes(tmp_path):
    path = tmp_path / "out.jsonl"
    first = answered(Line(1, b"a"), "a", 200, {"x": 1}, None)
    for _ in range(2):
        output = Output(str(path), resume=False, tmp_dir=None)
        output.write(first)
        output.close()
    assert path.read_bytes() == first
    path.write_bytes(first + b'{"id": "vllm-torn')
    output = Output(str(path), resume=True, tmp_dir=None)
    assert output.done == {Line(1, b"a").id}
    output.write(answered(Line(2, b"b"), "b", 200, {}, None))
    output.close()
    assert [json.loads(x)["custom_id"] for x in path.read_bytes().splitlines()] == ["a", "b"]


def test_two_runs_do_not_write_to_one_file(tmp_path):
    first = Output(str(tmp_path / "out"), resume=False, tmp_dir=None)
    first.write(b"kept\n")
    with pytest.raises(ConfigError, match="another batch is writing"):
        Output(str(tmp_path / "out"), resume=False, tmp_dir=None)
    first.close()
    assert (tmp_path / "out").read_bytes() == b"kept\n"
    Output("/dev/null", resume=False, tmp_dir=None).close()
    with pytest.raises(ConfigError, match="keeps nothing"):
        Output("/dev/null", resume=True, tmp_dir=None)


def test_a_file_of_another_kind_is_not_resumed(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text('"nothing of ours"\n')
    with pytest.raises(ConfigError, match=r"line 1 of .* is no answer of a batch"):
        Output(str(path), resume=True, tmp_dir=None)
    with pytest.raises(ConfigError, match="keeps nothing"):
        Output("https://example.com/out", resume=True, tmp_dir=None)


def test_an_upload_is_tried_again_and_then_kept(tmp_path, monkeypatch):
    seen: list[bytes] = []
    codes = [500, 503, 200]

    def put(url: str, *, content: io.BufferedReader, headers: dict[str, str], timeout: float) -> httpx.Response:
        seen.append(content.read())
        assert headers["Content-Length"] == str(len(seen[-1]))
        return httpx.Response(codes.pop(0), request=httpx.Request("PUT", url))

    monkeypatch.setattr(lines.httpx, "put", put)
    monkeypatch.setattr(lines, "UPLOAD_PAUSE_S", 0)
    output = Output("http://host/out", resume=False, tmp_dir=str(tmp_path))
    output.write(b"answer\n")
    output.finish()
    assert seen == [b"answer\n"] * 3
    assert not list(tmp_path.iterdir())
    codes += [500] * 5
    output = Output("http://host/out", resume=False, tmp_dir=str(tmp_path))
    output.write(b"kept\n")
    with pytest.raises(OSError, match="the upload failed"):
        output.finish()
    kept = next(tmp_path.iterdir())
    assert kept.read_bytes() == b"kept\n"
    assert str(kept) in output.left
    assert "--resume" not in output.left
