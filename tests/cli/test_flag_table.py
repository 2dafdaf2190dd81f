"""Every `vllm serve` flag of the release we follow exists, with its names, default, group and forms.

The table is tests/data/serve_flags.json: facts of the documented command line, one flag a line.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_clone.config.flags import FlagSpec, flags_of
from vllm_clone.entrypoints.cli import serve
from vllm_clone.entrypoints.cli.parser import FlagParser

TABLE: list[dict[str, Any]] = json.loads((Path(__file__).parent.parent / "data" / "serve_flags.json").read_text())
SPECS: dict[str, FlagSpec] = {spec.name: spec for group in serve.GROUPS for spec in flags_of(group)}
OURS = {"--device", "--dry-run"}
"""Flags that the release does not have."""
ROWS = [pytest.param(row, id=row["flag"]) for row in TABLE]
SETTING = [pytest.param(row, id=row["flag"]) for row in TABLE if row["flag"] != "--config"]
"""All but the flag that names a file of flags."""
SAMPLES: dict[str, tuple[list[str], Any]] = {
    "bool": ([], True),
    "int": (["7"], 7),
    "human_int": (["4k"], 4000),
    "int_or_auto": (["4k"], 4000),
    "float": (["0.25"], 0.25),
    "str": (["other"], "other"),
    "path": (["/some/where"], "/some/where"),
    "json": (['{"a": {"b": 1}}'], {"a": {"b": 1}}),
    "str_or_json": (['{"cuda:1": "cpu"}'], {"cuda:1": "cpu"}),
    "bool_or_str": (["word"], "word"),
    "list[str]": (["one", "two"], ["one", "two"]),
    "set[str]": (["one", "two"], ["one", "two"]),
    "list[int]": (["1", "2"], [1, 2]),
    "device_list": (["2,3"], ["2", "3"]),
    "lora_modules": (["a=/path"], [{"name": "a", "path": "/path"}]),
}
"""Type in the table → words of a value other than the default, and what they mean."""


def parser() -> FlagParser:
    made = FlagParser("vllm serve", serve.USAGE, "Serve.")
    serve.add_arguments(made)
    return made


PARSER = parser()


def sample(row: dict[str, Any]) -> tuple[list[str], Any]:
    """Words and their value, other than the default and within the choices."""
    spec = SPECS[row["flag"]]
    if row["flag"] == "--attention-backend":  # names are in capitals
        return ["Other"], "OTHER"
    if not spec.choices:
        return SAMPLES["list[str]" if spec.kind == "list" and row["type"] == "json" else row["type"]]
    value = next(c for c in spec.choices if c not in (spec.default, "none"))
    return [str(value)], [value] if spec.kind == "list" else value


def parsed(*argv: str) -> dict[str, Any]:
    given = vars(PARSER.parse(argv))
    return {k: v for k, v in given.items() if k not in ("model_tag", "config") or v is not None}


def test_no_flag_is_missing_and_ours_are_few():
    assert {row["flag"] for row in TABLE} == SPECS.keys() - OURS
    assert len(TABLE) == 314


@pytest.mark.parametrize("row", ROWS)
def test_names_group_and_default(row):
    spec = SPECS[row["flag"]]
    assert set(spec.aliases) == set(row.get("aliases", []))
    heading = spec.heading or spec.group.replace("FrontendConfig", "Frontend").replace("ServeConfig", "serve")
    assert heading == row["group"]
    assert ({} if spec.container else spec.default) == row["default"]


@pytest.mark.parametrize("row", SETTING)
def test_dashes_underscores_and_aliases_mean_the_same(row):
    words, value = sample(row)
    field = SPECS[row["flag"]].field
    underscored = "--" + row["flag"][2:].replace("-", "_")
    for name in (row["flag"], underscored, *row.get("aliases", [])):
        assert parsed(name, *words) == {field: value}
    if len(words) == 1:
        assert parsed(f"{row['flag']}={words[0]}") == {field: value}


@pytest.mark.parametrize("row", [r for r in TABLE if r["type"] == "bool"], ids=lambda row: row["flag"])
def test_switches_have_a_no_form_unless_they_are_one_way(row):
    spec = SPECS[row["flag"]]
    assert spec.one_way is not row["negatable"]
    if row["negatable"]:
        assert parsed("--no-" + row["flag"][2:]) == {spec.field: False}


@pytest.mark.parametrize("row", SETTING)
def test_a_yaml_file_may_say_it_too(row, tmp_path):
    words, value = sample(row)
    spec = SPECS[row["flag"]]
    written = True if not words else words if spec.kind == "list" else value
    if row["type"] in ("human_int", "int_or_auto"):
        written = words[0]
    path = tmp_path / "serve.yaml"
    for key in (row["flag"][2:], spec.field):
        path.write_text(json.dumps({key: written}))  # JSON is YAML
        assert parsed("--config", str(path)) == {"config": str(path), spec.field: value}
