"""A command's parser: flags from config fields, `-` and `_` alike, help by group, near misses named."""

import argparse
import difflib
import json
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from vllm_clone.config.flags import FlagSpec, flags_of
from vllm_clone.errors import ConfigError


class UsageError(Exception):
    """A wrong command line; one line, exit code 2."""


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser whose flags come in groups and whose errors are :class:`UsageError`.

    Names may be written with dashes or underscores. ``--help`` shows the groups, ``--help=all`` every flag,
    ``--help=WORD`` a group or the flags whose names contain the word.
    """

    def __init__(self, prog: str, usage: str, description: str) -> None:
        super().__init__(prog=prog, usage=usage, description=description, add_help=False, allow_abbrev=False)
        self._usage_line = usage
        self.groups: dict[str, tuple[str, list[argparse.Action]]] = {}

    def add_config(self, config_class: type) -> None:
        """Add the flags of a config group."""
        summary = (config_class.__doc__ or "").strip().splitlines()[0]
        actions = [self._add_flag(spec) for spec in flags_of(config_class)]
        self.groups[config_class.__name__.replace("FrontendConfig", "Frontend")] = (summary, actions)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse, or print help and exit 0. Flags not given leave no attribute.

        Raises:
            UsageError: an unknown flag, a missing or a wrong value.
        """
        argv = [_with_dashes(a) for a in argv]
        for arg in argv:
            if arg in ("-h", "--help") or arg.startswith("--help="):
                self._print_help(arg.partition("=")[2])
                raise SystemExit(0)
        namespace, rest = self.parse_known_args(argv)
        if rest:
            raise UsageError(self._unknown(rest[0]))
        return namespace

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def flag_names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]

    def _add_flag(self, spec: FlagSpec) -> argparse.Action:
        names = (spec.name, *spec.aliases)
        options: dict[str, Any] = {"dest": spec.field, "default": argparse.SUPPRESS, "help": _described(spec)}
        if spec.kind == "bool":
            action = "store_true" if spec.one_way else argparse.BooleanOptionalAction
            return self.add_argument(*names, action=action, **options)
        if spec.kind == "list":
            return self.add_argument(*names, nargs="+", action=_ListAction, metavar="VALUE", **options)
        return self.add_argument(*names, type=_Value(spec), metavar=_metavar(spec), **options)

    def _unknown(self, arg: str) -> str:
        if not arg.startswith("-"):
            return f"unexpected argument {arg!r}; see {self.prog} --help"
        name = arg.split("=")[0]
        near = difflib.get_close_matches(name, self.flag_names(), n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}?" if near else f"{self.prog} --help=all lists the flags that work."
        return f"unknown or not yet implemented flag {name}; {hint}"

    def _print_help(self, word: str) -> None:
        wanted = word.lower().replace("_", "-")
        if not wanted and self.groups:
            print(f"usage: {self._usage_line}\n\n{self.description}\n\nFlags come in groups:")
            for name, (summary, actions) in self.groups.items():
                print(f"  {name:<22}{summary} ({len(actions)})")
            print(f"\n{self.prog} --help=all shows every flag, --help=GROUP a group, --help=WORD the flags named so.")
            return
        by_group = [n for n in self.groups if n.lower() == wanted]
        plain = [a for a in self._actions if not any(a in actions for _, actions in self.groups.values())]
        if wanted in ("", "all"):
            print(f"usage: {self._usage_line}\n\n{self.description}\n")
            _show(plain)
            for name, (summary, actions) in self.groups.items():
                print(f"\n{name}: {summary}")
                _show(actions)
        elif by_group:
            summary, actions = self.groups[by_group[0]]
            print(f"{by_group[0]}: {summary}")
            _show(actions)
        else:
            found = [a for a in self._actions if any(wanted in option for option in a.option_strings)]
            print(f"Flags matching {word!r}:" if found else f"No group or flag matches {word!r}.")
            _show(found)


class _ListAction(argparse.Action):
    """Words, or one JSON list."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        if len(values) == 1 and values[0].startswith("["):
            try:
                values = json.loads(values[0])
            except ValueError as error:
                raise UsageError(f"{option_string} {values[0]}: not a JSON list ({error})") from error
        setattr(namespace, self.dest, values)


class _Value:
    """Text of one flag → its value."""

    def __init__(self, spec: FlagSpec) -> None:
        self._spec = spec

    def __call__(self, text: str) -> Any:
        spec = self._spec
        if spec.nullable and text in ("", "None"):
            return None
        try:
            value = json.loads(text) if spec.kind == "json" else spec.parse(text)
        except ValueError as error:
            what = "JSON" if spec.kind == "json" else spec.type_name
            raise UsageError(f"{spec.name} {text}: not a valid {what} ({error})") from error
        if spec.kind == "json" and not isinstance(value, dict):
            raise UsageError(f"{spec.name} {text}: must be a JSON object")
        if spec.choices and value not in spec.choices:
            near = difflib.get_close_matches(text, [str(c) for c in spec.choices], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"{spec.name} {text}: not one of {', '.join(map(str, spec.choices))}{hint}")
        return value


def _with_dashes(arg: str) -> str:
    """``--max_model_len=4`` → ``--max-model-len=4``; what follows a dot keeps its underscores."""
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg.partition("=")
    head, dot, tail = name.partition(".")
    return head.replace("_", "-") + dot + tail + equals + value


def _metavar(spec: FlagSpec) -> str:
    return "{" + ",".join(map(str, spec.choices)) + "}" if spec.choices else spec.type_name.upper()


def _described(spec: FlagSpec) -> str:
    return f"{spec.help} (default: {spec.default})".replace("%", "%%")


def _show(actions: Iterable[argparse.Action]) -> None:
    width = max(shutil.get_terminal_size().columns - 10, 40)
    for action in actions:
        names = ", ".join(action.option_strings) or action.dest
        value = "" if action.nargs == 0 or action.metavar is None else f" {action.metavar}"
        print(f"  {names}{value}")
        print(textwrap.indent(textwrap.fill((action.help or "").replace("%%", "%"), width), " " * 8))


def expand_config_file(argv: Sequence[str], one_way: frozenset[str]) -> list[str]:
    """Replace ``--config FILE`` (or ``--config=FILE``) by the YAML file's flags, before all typed ones.

    ``one_way`` names the switches that have no ``--no-`` form; false for them means leaving them out.

    Raises:
        ConfigError: unreadable, not a mapping, or given twice.
    """
    argv, found = list(argv), []
    for i, arg in enumerate(argv):
        if arg == "--config" or arg.startswith("--config="):
            found.append(i)
    if not found:
        return argv
    if len(found) > 1:
        raise ConfigError("--config may be given once; merge the files.")
    i = found[0]
    path, used = (argv[i].partition("=")[2], 1) if "=" in argv[i] else (argv[i + 1] if i + 1 < len(argv) else "", 2)
    return _yaml_flags(path, one_way) + argv[:i] + argv[i + used :]


def _yaml_flags(path: str, one_way: frozenset[str]) -> list[str]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file) or {}
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not valid YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: must map flag names to values.")
    argv: list[str] = []
    for key, value in values.items():
        name = "--" + str(key).replace("_", "-")
        if isinstance(value, bool):
            if value or name not in one_way:
                argv.append(name if value else "--no-" + name[2:])
        elif isinstance(value, list | dict):
            argv += [name, json.dumps(value)]
        elif value is not None:
            argv.append(f"{name}={value}")
    return argv
