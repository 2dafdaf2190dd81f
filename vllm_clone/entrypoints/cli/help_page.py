"""Help in its levels: groups, one group, one flag, everything; each flag with type, choices, default and support."""

import argparse
import json
import shutil
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from vllm_clone.config.flags import FlagSpec, keys_of
from vllm_clone.config.support import LEVELS

if TYPE_CHECKING:
    from vllm_clone.entrypoints.cli.parser import FlagParser

JSON_TIP = """
JSON flags may come in pieces: --flag '{"a": {"b": 1}, "c": ["x", "y"]}' is --flag.a.b 1 --flag.c+ x,y"""


def show(parser: "FlagParser", word: str) -> None:
    """Print the page that ``--help=WORD`` asks for; no word: what there is."""
    wanted = word.lower().replace("_", "-")
    in_groups = {id(action) for _, actions in parser.groups.values() for action in actions}
    by_group = [name for name in parser.groups if name.lower() == wanted]
    if wanted in ("", "all"):
        print(f"usage: {parser.usage_line}\n\n{parser.description}\n")
        _show(a for a in parser._actions if id(a) not in in_groups)
        if parser.groups and not wanted:
            _show_groups(parser)
        for name in parser.groups if wanted else ():
            _show_group(parser, name)
        if wanted and parser.groups:
            print(JSON_TIP)
    elif by_group:
        _show_group(parser, by_group[0])
        print(JSON_TIP)
    else:
        found = [a for a in parser._actions if any(wanted in option for option in a.option_strings)]
        print(f"Flags matching {word!r}:" if found else f"No group or flag matches {word!r}.")
        _show(found, keys=len(found) == 1)
        if not found:
            print(f"{parser.prog} --help lists the groups, --help=all every flag.")


def _show_group(parser: "FlagParser", name: str) -> None:
    summary, actions = parser.groups[name]
    print(f"\n{name}: {summary}" if summary else f"\n{name}")
    _show(sorted(actions, key=lambda action: action.option_strings[0]))


def _show_groups(parser: "FlagParser") -> None:
    print("\nFlags come in groups; the numbers say how many work here, of how many there are:")
    counts = dict.fromkeys(LEVELS, 0)
    for name, (summary, actions) in parser.groups.items():
        specs = [spec for action in actions if isinstance(spec := getattr(action, "spec", None), FlagSpec)]
        for spec in specs:
            counts[spec.level] += 1
        works = f"{sum(spec.level == 'works' for spec in specs)}/{len(actions)}" if specs else str(len(actions))
        print(f"  {name:<24}{works:>7}  {summary}")
    if any(counts.values()):
        print("\n" + ", ".join(f"{count} {LEVELS[level]}" for level, count in counts.items() if count) + ".")
    print(f"\n{parser.prog} --help=all shows every flag, --help=GROUP a group, --help=WORD the flags named so.")


def metavar(spec: FlagSpec) -> str:
    """What stands for the value in help."""
    if spec.choices:
        return "{" + ",".join(map(str, spec.choices)) + "}"
    return "VALUE" if spec.kind == "list" else spec.type_name.upper()


def described(spec: FlagSpec) -> str:
    """Help, default, and whether the flag acts in this build."""
    if spec.container:
        default = "{}"
    else:
        default = json.dumps(spec.default) if isinstance(spec.default, list | dict) else str(spec.default)
    known = f" Known: {', '.join(spec.known)}." if spec.known else ""
    return f"{spec.help}{known} (default: {default}){supported(spec)}".replace("%", "%%")


def supported(spec: FlagSpec) -> str:
    """`` [GPU only]`` and the like; nothing for a flag that works."""
    level = LEVELS[spec.support.level]
    if spec.support.level == "works":
        return ""
    if spec.working:
        return f" [{spec.what_works}; other values: {level}]"
    return f" [{level}]"


def _show(actions: Iterable[argparse.Action], *, keys: bool = False) -> None:
    for action in actions:
        names = ", ".join(action.option_strings) or action.dest
        value = "" if action.nargs == 0 or action.metavar is None else f" {action.metavar}"
        print(textwrap.fill(f"  {names}{value}", _width() + 8, subsequent_indent="      ", break_on_hyphens=False))
        _print_text((action.help or "").replace("%%", "%"))
        spec = getattr(action, "spec", None)
        if keys and isinstance(spec, FlagSpec) and spec.container:
            for key, inner in keys_of(spec).items():
                _print_text(f"{key}: {metavar(inner)} {described(inner)}")


def _print_text(text: str) -> None:
    print(textwrap.indent(textwrap.fill(text, _width(), break_on_hyphens=False, break_long_words=False), " " * 8))


def _width() -> int:
    return max(shutil.get_terminal_size().columns - 10, 40)
