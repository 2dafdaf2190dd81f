"""How a dataclass field becomes a flag."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

import vllm_clone
from vllm_clone.config import ENGINE_GROUPS, FrontendConfig, ServeConfig, VllmConfig
from vllm_clone.config.flags import FlagSpec, HumanInt, IntOrAuto, flag, flags_of, human_int, int_or_auto, resolved


@dataclass
class Sample:
    """A group with a flag of each kind."""

    switch: bool = flag(False, "A switch.")
    maybe: bool | None = flag(None, "A switch that may be unset.")
    count: int = flag(3, "A number.", aliases=("-c",))
    size: HumanInt | None = flag(None, "A size.", nullable=True)
    length: IntOrAuto | None = flag(None, "A length.")
    share: float = flag(0.5, "A share.")
    name: str | None = flag(None, "A name.", secret=True)
    mode: Literal["slow", "fast"] = flag("slow", "A mode.")
    power: Literal[1, 2, 4] | None = flag(None, "A power.")
    numbers: list[int] = flag([1], "Numbers.")
    extra: dict[str, Any] = flag({}, "Anything.")
    once: bool = flag(False, "One way.", one_way=True)
    derived: int = resolved(7)


SAMPLE: dict[str, FlagSpec] = {spec.field: spec for spec in flags_of(Sample)}


def test_every_flag_field_is_a_flag_in_order_and_no_resolved_field_is():
    fields = "switch maybe count size length share name mode power numbers extra once"
    assert list(SAMPLE) == fields.split()


@pytest.mark.parametrize(
    ("field", "kind", "choices"),
    [
        ("switch", "bool", None),
        ("maybe", "bool", None),
        ("count", "int", None),
        ("size", "int", None),
        ("length", "int", None),
        ("share", "float", None),
        ("name", "str", None),
        ("mode", "str", ("slow", "fast")),
        ("power", "int", (1, 2, 4)),
        ("numbers", "list", None),
        ("extra", "json", None),
    ],
)
def test_kind_and_choices_come_from_the_annotation(field, kind, choices):
    assert (SAMPLE[field].kind, SAMPLE[field].choices) == (kind, choices)


def test_what_the_field_says_beyond_its_type_is_kept():
    assert SAMPLE["count"].aliases == ("-c",)
    assert SAMPLE["once"].one_way
    assert SAMPLE["name"].secret
    assert SAMPLE["size"].nullable
    assert not SAMPLE["length"].nullable
    assert SAMPLE["count"].help == "A number."
    assert SAMPLE["numbers"].default == [1]


def test_two_configs_share_no_mutable_default():
    Sample().numbers.append(2)
    assert Sample().numbers == [1]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("1k", 1000),
        ("1K", 1024),
        ("25.6k", 25600),
        ("1.001k", 1001),
        ("2m", 2_000_000),
        ("2M", 2 * 2**20),
        ("1g", 10**9),
        ("1G", 2**30),
        ("1t", 10**12),
        ("1T", 2**40),
        ("0.5k", 500),
        ("-4", -4),
    ],
)
def test_human_integers(text, value):
    assert human_int(text) == value


@pytest.mark.parametrize(
    "text", ["", "1.5K", "1e3", "1x", "k", "1.5", "1.0001k", "0x10", "1 k", "auto", "nan", "9223372036854775808"]
)
def test_what_is_no_human_integer(text):
    with pytest.raises(ValueError, match=r".+"):
        human_int(text)


def test_a_fraction_of_a_binary_unit_is_refused_with_the_decimal_one():
    with pytest.raises(ValueError, match="use k"):
        human_int("1.5K")


@pytest.mark.parametrize(("text", "value"), [("auto", -1), ("AUTO", -1), ("-1", -1), ("4k", 4000)])
def test_a_length_may_be_auto(text, value):
    assert int_or_auto(text) == value


@pytest.mark.parametrize(
    ("field", "value"),
    [("count", "3"), ("count", 3.5), ("count", True), ("switch", 1), ("numbers", ["1"]), ("extra", []), ("share", "1")],
)
def test_a_python_value_of_another_type_is_refused(field, value):
    with pytest.raises(ValueError, match="Expected"):
        SAMPLE[field].check(value)


def test_pieces_of_text_become_what_the_type_asks_for():
    assert SAMPLE["numbers"].check(["1", "2"], from_text=True) == [1, 2]
    with pytest.raises(ValueError, match="Expected `int`"):
        SAMPLE["numbers"].check(["x"], from_text=True)


def test_an_integer_is_a_fine_float_and_none_a_fine_optional():
    assert SAMPLE["share"].check(1) == 1.0
    assert SAMPLE["size"].check(None) is None


def test_names_and_aliases_are_unique_over_all_groups_and_defaults_fit_their_types():
    specs = [spec for group in (FrontendConfig, *ENGINE_GROUPS.values()) for spec in flags_of(group)]
    names = [name for spec in specs for name in (spec.name, *spec.aliases)]
    assert len(names) == len(set(names))
    for spec in specs:
        assert spec.check(spec.default) == spec.default
        assert spec.help.endswith(".") or "=" in spec.help, spec.name


def names_read() -> set[str]:
    """Names of attributes that the code reads anywhere outside the declarations of the configuration."""
    package = Path(vllm_clone.__file__).parent
    found = set()
    for path in package.rglob("*.py"):
        if path.parent != package / "config":
            nodes = ast.walk(ast.parse(path.read_text()))
            found |= {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    return found


def test_every_flag_that_works_has_someone_who_reads_it():
    read = names_read()
    specs = [spec for group in (ServeConfig, FrontendConfig, *ENGINE_GROUPS.values(), VllmConfig)
             for spec in flags_of(group)]  # fmt: skip
    # Where only some values work, the refusal of the others reads it; a group is read by its own fields.
    act = [spec for spec in specs if spec.support.level == "works" and not spec.container]
    assert len(act) > 100
    assert [spec.name for spec in act if spec.field not in read and spec.field != "async_scheduling"] == []
