"""The pages made from the flags' definitions."""

from pathlib import Path

import pytest

from vllm_clone.entrypoints.cli import reference
from vllm_clone.entrypoints.cli.main import COMMANDS, parser_of

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_page_in_docs_is_what_the_definitions_give(name: str) -> None:
    assert (DOCS / name).read_text() == reference.PAGES[name](), f"run {reference.COMMAND}"


def test_every_option_of_every_command_is_on_the_page() -> None:
    page = reference.cli_page()
    for command in COMMANDS:
        parser, _ = parser_of(command)
        assert all(f"`{option}`" in page for action in parser._actions for option in action.option_strings)


def test_every_flag_that_cannot_act_is_listed_with_its_reason() -> None:
    page, specs = reference.support_page(), list(reference.serve_flags())
    assert sum(reference.counts(specs).values()) == len(specs) > 300
    for spec in specs:
        listed = any(line.startswith(f"- `{spec.name}`") for line in page.splitlines())
        assert listed >= (spec.support.level != "works")
        assert spec.support.level == "works" or spec.support.reason in page
