"""Prompts, or their lengths, out of local files."""

import csv
import io
import json
import random
from collections.abc import Iterable
from typing import Any

from vllm_clone.benchmarks.serve.datasets.request import Request, field, json_lines, read_text
from vllm_clone.benchmarks.serve.sample import Sample
from vllm_clone.errors import ConfigError

MIN_TOKENS, MAX_PROMPT_TOKENS, MAX_TOTAL_TOKENS = 4, 1024, 2048
"""Bounds of a ShareGPT conversation that is used."""
SONNET_TASK = "Choose as many of the following lines as you like and write them down in a new order:\n"


def sharegpt(request: Request) -> list[Sample]:
    """``sharegpt``: the first message of a conversation, and the length of the answer it got."""
    return sharegpt_rows(request, _json_list(request), request.flags["sharegpt_output_len"])


def sharegpt_rows(request: Request, rows: list[Any], fixed_output: int | None) -> list[Sample]:
    """Samples of conversations whose lengths are within the bounds."""
    samples: list[Sample] = []
    for row in request.shuffled([r for r in rows if len(_turns(r)) >= 2]):
        if len(samples) == request.count > 0:
            break
        prompt, answer = (str(turn.get("value", "")) for turn in _turns(row)[:2])
        size = request.length(prompt)
        output = len(request.words.encode(answer)) if fixed_output is None else fixed_output
        is_short = size < MIN_TOKENS or (fixed_output is None and output < MIN_TOKENS)
        if not is_short and size <= MAX_PROMPT_TOKENS and size + output <= MAX_TOTAL_TOKENS:
            samples.append(Sample(prompt, size, output))
    return request.enough(samples)


def _json_list(request: Request) -> list[Any]:
    try:
        rows = json.loads(read_text(request.path))
    except ValueError as error:
        raise ConfigError(f"--dataset-path {request.path}: not valid JSON: {error}.") from error
    if not isinstance(rows, list):
        raise ConfigError(f"--dataset-path {request.path}: must be a JSON list of conversations.")
    return rows


def _turns(row: Any) -> list[dict[str, Any]]:
    turns = row.get("conversations") or row.get("conversation") if isinstance(row, dict) else None
    return [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []


def sonnet(request: Request) -> list[Sample]:
    """``sonnet``: a task and lines of a text, the first ones the same in every prompt."""
    flags = request.flags
    lines = [line + "\n" for line in read_text(request.path).splitlines() if line.strip()]
    if not lines:
        raise ConfigError(f"--dataset-path {request.path}: has no lines.")
    per_line = sum(len(request.words.encode(line, add_special_tokens=False)) for line in lines) / len(lines)
    base = request.length(request.message(SONNET_TASK))
    size, shared = flags["sonnet_input_len"], flags["sonnet_prefix_len"]
    if size <= base or shared > size:
        raise ConfigError(f"--sonnet-input-len {size}: must be above {base}, and no less than --sonnet-prefix-len.")
    total = max(1, round((size - base) / per_line))
    common = min(max(0, round((shared - base) / per_line)), total, len(lines))
    chooser = random.Random(request.seed)
    samples = []
    for _ in range(request.count):
        prompt = request.message(SONNET_TASK + "".join(lines[:common] + chooser.choices(lines, k=total - common)))
        samples.append(Sample(prompt, request.length(prompt), flags["sonnet_output_len"]))
    return samples


def burstgpt(request: Request) -> list[Sample]:
    """``burstgpt``: made-up text with the lengths of GPT-4's successful requests."""
    rows = []
    for number, row in enumerate(csv.DictReader(io.StringIO(read_text(request.path))), 2):
        try:
            if row["Model"] == "GPT-4" and int(row["Response tokens"]) > 0:
                rows.append((int(row["Request tokens"]), int(row["Response tokens"])))
        except (KeyError, TypeError, ValueError) as error:
            columns = "Model, Request tokens and Response tokens"
            raise ConfigError(f"--dataset-path {request.path}:{number}: needs the columns {columns}.") from error
    if not rows:
        return []
    chooser = random.Random(request.seed)
    count = request.count or len(rows)
    if count > len(rows) and request.flags["no_oversample"]:
        count = len(rows)
    chosen = chooser.sample(rows, count) if count <= len(rows) else chooser.choices(rows, k=count)
    size = request.words.vocab_size
    return [
        Sample(request.words.decode([(i + j) % size for j in range(prompt)]), prompt, output)
        for i, (prompt, output) in enumerate(chosen)
    ]


def custom(request: Request) -> list[Sample]:
    """``custom``: ``prompt``, and ``output_tokens`` where the length comes from the rows."""
    if request.path.suffix != ".jsonl":
        raise ConfigError(f"--dataset-path {request.path}: must be a .jsonl file.")
    output = request.flags["custom_output_len"]
    rows = []
    for where, row in request.lines():
        length = field(where, row, "output_tokens", int) if output == -1 else output
        if length < 1:
            raise ConfigError(f"--dataset-path {where}: the output length must be at least 1.")
        rows.append((field(where, row, "prompt", str), length))
    return messages(request, rows)


def spec_bench(request: Request) -> list[Sample]:
    """``spec_bench``: the first of ``turns``."""
    wanted = request.flags["spec_bench_category"]
    rows = []
    for where, row in request.lines():
        if wanted is None or row.get("category") == wanted:
            rows.append((_first(where, field(where, row, "turns", list)), request.flags["spec_bench_output_len"]))
    return messages(request, rows)


def speed_bench(request: Request) -> list[Sample]:
    """``speed_bench``: the first of ``messages`` in a subset's file of the directory."""
    path = request.path / f"{request.flags['speed_bench_dataset_subset']}.jsonl"
    wanted = request.flags["speed_bench_category"]
    rows = []
    for where, row in json_lines(path):
        if wanted is None or row.get("category") == wanted:
            first = _first(where, field(where, row, "messages", list))
            rows.append((first, request.flags["speed_bench_output_len"]))
    return messages(request, rows)


def _first(where: str, turns: list[Any]) -> str:
    first = turns[0] if turns else None
    text = first.get("content") if isinstance(first, dict) else first
    if not isinstance(text, str):
        raise ConfigError(f"--dataset-path {where}: its first turn must be a text.")
    return text


def messages(request: Request, rows: Iterable[tuple[str, int]]) -> list[Sample]:
    """Samples of (text, output length), each text as a user's message."""
    chosen = request.shuffled(list(rows))[: request.count or None]
    prompts = [(request.message(text), output) for text, output in chosen]
    return request.enough([Sample(prompt, request.length(prompt), output) for prompt, output in prompts])
