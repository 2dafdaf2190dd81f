"""docs/cli.md and docs/support.md out of the flags' definitions.

    python -m vllm_clone.entrypoints.cli.reference [DIRECTORY]

writes both into the directory, docs/ when none is given.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from vllm_clone.config.flags import FlagSpec, flags_of, keys_of
from vllm_clone.config.support import LEVELS, Level
from vllm_clone.entrypoints.cli import help_page, serve, to_come
from vllm_clone.entrypoints.cli.main import COMMANDS, parser_of
from vllm_clone.entrypoints.cli.parser import FlagParser

COMMAND = "python -m vllm_clone.entrypoints.cli.reference"
DIFFERENCES = (
    ("`--api-server-count`", "a drain reaches every API server; queue limits and /load count the requests of all"),
    ("`--async-scheduling`", "refused on a CPU, where choosing a step takes 1 % of computing it; `--no-` is accepted"),
    ("`--block-size`", "32 when not given (vLLM on a CPU: 128): prefixes are shared in smaller pieces"),
    ("`--config`", "`--config=FILE` is read; `false` in the file switches off; unknown keys are refused"),
    ("`--disable-cascade-attn`", "a prefix that decoding requests share is always read once: it changes no bit here"),
    ("dotted pieces", "`--flag.a 1 --flag.b 2` are laid over each other and over `--flag '{...}'`"),
    ("`--kv-cache-memory-bytes`", "wins over `VLLM_CPU_KVCACHE_SPACE`"),
    ("`--model`", "loses to the positional model, with a warning"),
    ("unknown flags", "exit code 2 and the nearest names, as for every wrong value, in one line"),
)
"""Flag, and how it differs from vLLM's on purpose."""


def cli_page() -> str:
    """docs/cli.md: every command with every flag."""
    lines = [
        "# Command line",
        "",
        f"Made by `{COMMAND}`;",
        "`vllm COMMAND --help` says the same. Names take `_` for `-`. What brackets say not to act is refused: see",
        "[support.md](support.md).",
    ]
    shown: set[str] = set()
    for name in COMMANDS:
        parser, _ = parser_of(name)
        lines += ["", f"## {parser.prog}", "", parser.description or "", "", f"    {parser.usage_line}"]
        lines += _command(parser, shown)
    lines += ["", "## To come", "", "These say so, name what does the work until then, and exit with code 2.", ""]
    entries = to_come.COMMANDS | {f"bench {kind}": entry for kind, entry in to_come.BENCH_KINDS.items()}
    lines += [f"- `vllm {name}`: {entry.what} Instead: {entry.instead}." for name, entry in entries.items()]
    return "\n".join(lines) + "\n"


def _command(parser: FlagParser, shown: set[str]) -> Iterator[str]:
    """``shown``: what earlier commands have told; groups that are there in full are only named."""
    grouped = {id(action) for _, actions in parser.groups.values() for action in actions}
    alone = [action for action in parser._actions if id(action) not in grouped]
    yield ""
    yield from map(_item, alone)
    told = []
    for name, (summary, actions) in parser.groups.items():
        items = [_item(action) for action in sorted(actions, key=lambda action: action.option_strings[0])]
        if items and shown.issuperset(items):
            told.append(name)
        elif items:
            yield from ("", f"### {name}", "", summary, "", *items)
        shown.update(items)
    if told:
        yield from ("", f"And the flags above of {', '.join(told)}.")


def _item(action: argparse.Action) -> str:
    names = ", ".join(f"`{option}`" for option in action.option_strings) or f"`{action.dest}`"
    value = "" if action.nargs == 0 or action.metavar is None else f" `{action.metavar}`"
    spec = getattr(action, "spec", None)
    text = f"- {names}{value}: {(action.help or '').replace('%%', '%')}"
    if isinstance(spec, FlagSpec) and spec.container:
        for key, inner in keys_of(spec).items():
            text += f"\n  - `{key}` `{help_page.metavar(inner)}`: {help_page.described(inner).replace('%%', '%')}"
    return text


def serve_flags() -> Iterator[FlagSpec]:
    """Every flag of ``vllm serve``."""
    for group in serve.GROUPS:
        yield from flags_of(group)


def counts(specs: Iterable[FlagSpec]) -> dict[Level, int]:
    """How many flags there are of each level."""
    found: dict[Level, int] = dict.fromkeys(LEVELS, 0)
    for spec in specs:
        found[spec.level] += 1
    return found


def support_page() -> str:
    """docs/support.md: how many flags act, which do not and why, and what differs from vLLM."""
    specs = sorted(serve_flags(), key=lambda spec: spec.name)
    lines = [
        "# What works",
        "",
        f"Made by `{COMMAND}`.",
        "A flag of `vllm serve` that cannot act stops the start with reason and remedy (exit code 2) before a weight",
        "is loaded, and only when its value is not the default.",
        "",
        "| Level | Flags |",
        "|---|--:|",
        *(f"| {LEVELS[level]} | {count} |" for level, count in counts(specs).items() if count),
        f"| all | {len(specs)} |",
    ]
    for level, title in LEVELS.items():
        refused = [spec for spec in specs if spec.support.level == level]
        if level == "works" or not refused:
            continue
        lines += ["", f"## {title[0].upper()}{title[1:]}", ""]
        for spec in refused:
            some = f" ({spec.what_works})" if spec.working else ""
            lines.append(f"- `{spec.name}`{some}: {spec.support.reason}")
    lines += ["", "## Different from vLLM on purpose", ""]
    lines += [f"- {flag}: {how}" for flag, how in DIFFERENCES]
    return "\n".join(lines) + "\n"


PAGES = {"cli.md": cli_page, "support.md": support_page}
"""File → what writes it."""


def main(directory: Path) -> None:
    """Write both pages."""
    for name, page in PAGES.items():
        (directory / name).write_text(page())


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
