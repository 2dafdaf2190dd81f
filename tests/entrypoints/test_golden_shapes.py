"""Every recorded exchange, replayed: key order, types, event order, status, errors and headers are the same."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.data.distill_captures import event_shapes, headers_shape, same, shape
from tests.entrypoints.http_server import HTTPServer, http_config
from tests.entrypoints.known_differences import DIFFERENCES

DATA = Path(__file__).parents[1] / "data" / "http"
KEY = "secret-key"
OPEN_SERVER = ("01", "02", "03", "04", "05", "06", "07", "08", "10", "11", "12", "30", "31")


def _nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HUGE: dict[str, Any] = {
    "<'a ' repeated 3000 times>": "a " * 3000,
    "<token id 1 repeated 2049 times>": [1] * 2049,
    "<token id 504 repeated 2048 times>": [504] * 2048,
    "<token id 504 repeated 2047 times>": [504] * 2047,
    "<object schema nested 100 times under properties.a>": _nested(100),
    "<object schema nested 30 times under properties.a>": _nested(30),
    '{"prompt":"x","max_tokens":<5000 digits of 9>}': '{"prompt":"x","max_tokens":' + "9" * 5000 + "}",
    '{"model":"smollm2","prompt":<100000 nested empty arrays>}':
        '{"model":"smollm2","prompt":' + "[" * 100_000 + "]" * 100_000 + "}",
    '{"max_tokens":1,"prompt":"<20 MB of \'a \'>"}': '{"max_tokens":1,"prompt":"' + "a " * 10_000_000 + '"}',
}  # fmt: skip
"""What the fixtures describe instead of holding."""


def cases(*numbers: str) -> list[Any]:
    out = []
    for path in sorted(DATA.glob("*.json")):
        if path.stem[:2] in numbers:
            out += [pytest.param(path.stem, c, id=f"{path.stem[:2]}: {c['name']}") for c in _load(path)]
    return out


def _load(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())


ERROR_CASES = [
    pytest.param(c["section"], c, id=f"{c['section'][:2]}: {c['name']}") for c in _load(DATA / "error_table.json")
]


def send(server: HTTPServer, case: dict[str, Any]) -> httpx.Response:
    """The case's request as it was sent."""
    headers = {k: (v or "").replace("<key>", KEY) for k, v in case.get("headers", {}).items()}
    if server.frontend.api_key and "Authorization" not in headers:
        headers["Authorization"] = f"Bearer {KEY}"
    content: bytes | None = None
    if "raw_body_base64" in case:
        content = base64.b64decode(case["raw_body_base64"])
    elif "raw_body_description" in case:
        content = HUGE[case["raw_body_description"]].encode()
    elif "raw_body" in case:
        content = case["raw_body"].encode("utf-8", "surrogatepass")
    elif case.get("body") is not None:
        content = json.dumps(_filled(case["body"])).encode()
    if content is not None and "Content-Type" not in headers:
        headers["Content-Type"] = "application/json"
    headers = {k: v for k, v in headers.items() if v}
    server.script = case.get("script", [])
    body = case.get("body")
    server.choices_per_prompt = body.get("n") or 1 if isinstance(body, dict) else 1
    return server.client.request(case["method"], server.url + case["path"], headers=headers, content=content)


def _filled(value: Any) -> Any:
    if isinstance(value, str):
        return HUGE.get(value, value)
    if isinstance(value, dict):
        return {k: _filled(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_filled(v) for v in value]
    return value


def answer_of(response: httpx.Response) -> dict[str, Any]:
    """What the fixture holds of an answer."""
    kind = response.headers.get("content-type")
    out: dict[str, Any] = {"status": response.status_code, "content_type": kind}
    out["response_headers"] = headers_shape(response.headers)
    if kind and kind.startswith("text/event-stream"):
        blocks = [b.removeprefix("data: ") for b in response.text.split("\n\n") if b]
        out["events"] = event_shapes([b if b == "[DONE]" else json.loads(b) for b in blocks])
    elif kind and kind.startswith("application/json") and response.content:
        out["answer"] = shape(response.json())
    elif kind and kind.startswith("application/json"):
        out["answer"] = None  # HEAD
    else:
        out["text"] = f"str of {len(response.text)}"
    return out


def check(section: str, case: dict[str, Any], response: httpx.Response) -> None:
    actual = answer_of(response)
    found: dict[str, str] = {}
    for key in ("status", "content_type", "response_headers", "answer", "text"):
        if key in case and (key != "text" or case["status"] != 307):
            found |= differences(actual.get(key), case[key], key)
    if "events" in case and actual["status"] == 200:
        check_events(actual["events"], case["events"])
    expected = DIFFERENCES.get((section[:2], case["name"]))
    if expected is None:
        assert found == {}
        return
    assert found, "this difference is gone: take it out of the list"
    if expected.only is not None:
        assert set(found) == {expected.only}
    assert response.status_code == expected.status, response.text[:500]
    if expected.status >= 400 and expected.type is not None:
        error = response.json()["error"]
        assert (error["type"], error["param"], error["code"]) == (expected.type, expected.param, expected.status)


def differences(ours: Any, theirs: Any, path: str) -> dict[str, str]:
    """Each place where two shapes differ, and how."""
    pairs: list[tuple[str, Any, Any]] | None = None
    if isinstance(ours, dict) and isinstance(theirs, dict) and list(ours) == list(theirs):
        pairs = [(f"{path}.{k}", ours[k], theirs[k]) for k in ours]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    if pairs is not None:
        return {k: v for where, a, b in pairs for k, v in differences(a, b, where).items()}
    return {} if same(ours, theirs) else {path: f"ours is {ours}, recorded is {theirs}"}


def check_events(actual: list[Any], expected: list[Any]) -> None:
    """The same events; choices may be interleaved differently, but each one's own order is kept."""
    assert len(actual) == len(expected)

    def of(events: list[Any]) -> dict[Any, list[Any]]:
        lanes: dict[Any, list[Any]] = {}
        for event in events:
            choices = event["choices"]["items"] if event != "[DONE]" else []
            lanes.setdefault(choices[0]["index"] if choices else None, []).append(event)
        return lanes

    ours, theirs = of(actual), of(expected)
    assert sorted(map(str, ours)) == sorted(map(str, theirs))
    for lane, events in theirs.items():
        assert differences(ours[lane], events, f"events of choice {lane}") == {}


@pytest.mark.parametrize(("section", "case"), cases(*OPEN_SERVER))
def test_answers_have_the_recorded_shape(server: HTTPServer, section: str, case: dict[str, Any]):
    check(section, case, send(server, case))


@pytest.mark.parametrize(("section", "case"), ERROR_CASES)
def test_error_table(server: HTTPServer, section: str, case: dict[str, Any]):
    check(section, case, send(server, case))


@pytest.fixture(scope="module")
def guarded_server() -> Iterator[HTTPServer]:
    """The flags of the second recorded server."""
    config = http_config(served_model_name=["smollm2", "alias2"])
    with HTTPServer(
        config, api_key=[KEY], allowed_origins=["*"], enable_request_id_headers=True, trust_request_chat_template=True,
        enable_prompt_tokens_details=True, enable_server_load_tracking=True, enable_tokenizer_info_endpoint=True,
    ) as running:  # fmt: skip
        yield running


@pytest.mark.parametrize(("section", "case"), cases("50"))
def test_keys_request_ids_and_cors(guarded_server: HTTPServer, section: str, case: dict[str, Any]):
    check(section, case, send(guarded_server, case))


def test_every_listed_difference_belongs_to_a_case():
    known = {(s[:2], c["name"]) for s, c in (p.values for p in [*cases(*OPEN_SERVER, "50"), *ERROR_CASES])}
    assert set(DIFFERENCES) <= known
