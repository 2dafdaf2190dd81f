"""Data sets of the Hugging Face hub, out of a local JSON, JSONL or CSV file of theirs."""

import csv
import io
import json
from collections.abc import Callable
from typing import Any

from vllm_clone.benchmarks.serve.datasets.files import messages, sharegpt_rows
from vllm_clone.benchmarks.serve.datasets.request import Request, json_lines, read_text
from vllm_clone.benchmarks.serve.sample import Sample
from vllm_clone.errors import ConfigError

Row = dict[str, Any]


def _first_turn(row: Row) -> str:
    return str(row["turns"][0])


def _instruction(row: Row) -> str:
    return f"{row['input']}\n\n{row['instruction']}\nAnswer with the whole changed code and nothing else."


def _edit(row: Row) -> str:
    return f"Here is a file:\n{row['old_code']}\n\nChange it so: {row['change_request']}\nAnswer with the whole file."


SETS: dict[str, tuple[Callable[[Row], str], int]] = {
    "philschmid/mt-bench": (_first_turn, 256),
    "likaixin/InstructCoder": (_instruction, 200),
    "openai/openai_humaneval": (lambda row: str(row["prompt"]), 256),
    "openai/gsm8k": (lambda row: str(row["question"]), 256),
    "vdaita/edit_5k_char": (_edit, 4000),
    "vdaita/edit_10k_char": (_edit, 4000),
    "AI-MO/aimo-validation-aime": (lambda row: str(row["problem"]), 0),
    "AI-MO/NuminaMath-1.5": (lambda row: str(row["problem"]), 0),
    "AI-MO/NuminaMath-CoT": (lambda row: str(row["problem"]), 0),
}
"""Hub id → (a row's prompt, default output length; 0: that of the row's ``solution``)."""
SHAREGPT = "Aeala/ShareGPT_Vicuna_unfiltered"


def hub_rows(request: Request) -> list[Sample]:
    """``hf``: rows of a known set."""
    flags = request.flags
    name = flags["hf_name"] or flags["dataset_path"]
    if not request.path.is_file():
        raise ConfigError(
            f"--dataset-path {request.path}: no such file; download one of the set's JSON, JSONL or CSV files and "
            "name the set with --hf-name."
        )
    rows = _rows(request)
    if name == SHAREGPT:
        return sharegpt_rows(request, rows, flags["hf_output_len"])
    if name not in SETS:
        raise ConfigError(f"--hf-name {name}: must be one of {', '.join([SHAREGPT, *SETS])}.")
    prompt, default = SETS[name]
    low, high = flags["blazedit_min_distance"], flags["blazedit_max_distance"]
    chosen = []
    try:
        for row in rows:
            if low <= float(row.get("norm_distance", low)) <= high:
                fixed = flags["hf_output_len"] or default
                chosen.append((prompt(row), fixed or request.length(str(row["solution"]))))
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ConfigError(f"--dataset-path {request.path}: not rows of {name}: {error!r}.") from error
    return messages(request, chosen)


def _rows(request: Request) -> list[Row]:
    path = request.path
    if path.suffix == ".jsonl":
        return [row for _, row in json_lines(path)]
    if path.suffix == ".csv":
        return list(csv.DictReader(io.StringIO(read_text(path))))
    if path.suffix == ".json":
        try:
            rows = json.loads(read_text(path))
        except ValueError as error:
            raise ConfigError(f"--dataset-path {path}: not valid JSON: {error}.") from error
        if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
            return rows
    raise ConfigError(f"--dataset-path {path}: must be a .jsonl, .csv, or a .json file with a list of objects.")
