"""A command's parser: flags from config fields, `-` and `_` alike, help by group, near misses named."""

import argparse
import difflib
import itertools
import json
import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from vllm_clone.config.flags import FlagSpec, flags_of
from vllm_clone.errors import ConfigError


class UsageError(Exception):
    """A wrong command line; one line, exit code 2."""


class HelpShown(Exception):
    """Help was asked for and printed; exit code 0."""


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser whose flags come in groups and whose errors are :class:`UsageError`.

    Names may be written with dashes or underscores, and cut short while they stay unique. ``--help`` shows the groups,
    ``--help=all`` every flag, ``--help=WORD`` a group or the flags whose names contain the word.
    """

    def __init__(self, prog: str, usage: str, description: str) -> None:
        super().__init__(prog=prog, usage=usage, description=description, add_help=False, allow_abbrev=True)
        self._usage_line = usage
        self.groups: dict[str, tuple[str, list[argparse.Action]]] = {}

    def add_config(self, config_class: type) -> None:
        """Add the flags of a config group."""
        summary = (config_class.__doc__ or "").strip().splitlines()[0]
        actions = [self._add_flag(spec) for spec in flags_of(config_class)]
        self.groups[config_class.__name__.replace("FrontendConfig", "Frontend")] = (summary, actions)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse a command line. Flags not given leave no attribute.

        Raises:
            HelpShown: the line asks for help, wherever it does.
            UsageError: an unknown flag, a missing or a wrong value.
        """
        for arg in argv:
            if any("\ud800" <= c <= "\udfff" for c in arg):  # bytes of the command line that are no UTF-8
                raise UsageError(f"argument {arg!a} is not valid UTF-8")
        argv = [_with_dashes(a) for a in argv]
        for arg in itertools.takewhile(lambda a: a != "--", argv):
            if arg in ("-h", "--help") or arg.startswith("--help="):
                self._print_help(arg.partition("=")[2])
                raise HelpShown
        namespace, rest = self.parse_known_args(argv)
        if rest:
            raise UsageError(self._unknown(rest[0]))
        return namespace

    def error(self, message: str) -> NoReturn:
        switch = re.fullmatch(r"argument (--[\w-]+)/--no-[\w-]+: ignored explicit argument .*", message)
        if switch is not None:
            name = switch[1]
            message = f"{name} takes no value; write {name} or --no-{name[2:]}"
        raise UsageError(message.removeprefix("argument "))

    def flag_names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]

    def _add_flag(self, spec: FlagSpec) -> argparse.Action:
        names = (spec.name, *spec.aliases)
        options: dict[str, Any] = {"dest": spec.field, "default": argparse.SUPPRESS, "help": _described(spec)}
        if spec.kind == "bool":
            action = "store_true" if spec.one_way else argparse.BooleanOptionalAction
            return self.add_argument(*names, action=action, **options)
        if spec.kind == "list":
            return self.add_argument(*names, nargs="+", action=_list_action(spec), metavar="VALUE", **options)
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
        in_groups = {id(action) for _, actions in self.groups.values() for action in actions}
        plain = [a for a in self._actions if id(a) not in in_groups]
        by_group = [name for name in self.groups if name.lower() == wanted]
        if wanted in ("", "all"):
            print(f"usage: {self._usage_line}\n\n{self.description}\n")
            _show(plain)
            if self.groups and not wanted:
                self._print_group_names()
            for name, (summary, actions) in self.groups.items() if wanted else ():
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
            if not found:
                print(f"{self.prog} --help lists the groups, --help=all every flag.")

    def _print_group_names(self) -> None:
        print("\nFlags come in groups:")
        for name, (summary, actions) in self.groups.items():
            print(f"  {name:<22}{summary} ({len(actions)})")
        print(f"\n{self.prog} --help=all shows every flag, --help=GROUP a group, --help=WORD the flags named so.")


def _list_action(spec: FlagSpec) -> type[argparse.Action]:
    """An action that takes words, or one JSON list, as the list that the flag's type asks for."""

    class ListAction(argparse.Action):
        def __call__(
            self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
        ) -> None:
            if len(values) == 1 and values[0].startswith("["):
                values = _json(spec, values[0])
            if spec.nullable and values in ([""], ["None"]):
                values = None
            try:
                values = spec.check(values, from_text=True)
            except ValueError as error:
                raise UsageError(f"{spec.name} {json.dumps(values)}: {error}") from error
            setattr(namespace, self.dest, values)

    return ListAction


class _Value:
    """Text of one flag → its value."""

    def __init__(self, spec: FlagSpec) -> None:
        self._spec = spec

    def __call__(self, text: str) -> Any:
        spec = self._spec
        if spec.nullable and text in ("", "None"):
            return None
        if spec.kind == "json":
            value = _json(spec, text)
            if not isinstance(value, dict):
                raise UsageError(f"{spec.name} {text}: must be a JSON object")
            return value
        try:
            value = spec.parse(text)
        except ValueError as error:
            raise UsageError(f"{spec.name} {text}: {_reason(spec, error)}") from error
        if spec.choices and value not in spec.choices:
            near = difflib.get_close_matches(text, [str(c) for c in spec.choices], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"{spec.name} {text}: not one of {', '.join(map(str, spec.choices))}{hint}")
        return value


def _json(spec: FlagSpec, text: str) -> Any:
    def refuse(name: str) -> NoReturn:
        raise ValueError(f"{name} is no JSON number")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{spec.name} {text}: not valid JSON ({error})") from error


def _reason(spec: FlagSpec, error: ValueError) -> str:
    """Our own parsers explain themselves; float does not."""
    return "not a number" if spec.parse is float else str(error)


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
    default = json.dumps(spec.default) if isinstance(spec.default, list | dict) else spec.default
    return f"{spec.help} (default: {default})".replace("%", "%%")


def _show(actions: Iterable[argparse.Action]) -> None:
    width = max(shutil.get_terminal_size().columns - 10, 40)
    for action in actions:
        names = ", ".join(action.option_strings) or action.dest
        value = "" if action.nargs == 0 or action.metavar is None else f" {action.metavar}"
        print(f"  {names}{value}")
        print(textwrap.indent(textwrap.fill((action.help or "").replace("%%", "%"), width), " " * 8))


def expand_config_file(argv: Sequence[str], one_way: frozenset[str]) -> list[str]:
    """Put the flags of the YAML file that ``--config FILE`` (or ``--config=FILE``) names before all typed ones.

    ``one_way`` names the switches that have no ``--no-`` form; false for them means leaving them out.

    Raises:
        ConfigError: unreadable, not a mapping, or given twice.
    """
    found = [i for i, arg in enumerate(argv) if arg == "--config" or arg.startswith("--config=")]
    if not found:
        return list(argv)
    if len(found) > 1:
        raise ConfigError("--config may be given once; merge the files.")
    typed = argv[found[0]]
    following = argv[found[0] + 1 : found[0] + 2]
    path = typed.partition("=")[2] if "=" in typed else next(iter(following), "")
    if not path:
        raise ConfigError("--config: no file given; write --config FILE.")
    return [*_yaml_flags(path, one_way), *argv]


def _yaml_flags(path: str, one_way: frozenset[str]) -> list[str]:
    argv: list[str] = []
    for key, value in _read_yaml(path).items():
        name = "--" + str(key).replace("_", "-")
        if name == "--config":
            raise ConfigError(f"--config {path}: names another config file; merge the two.")
        if isinstance(value, bool):
            if value or name not in one_way:
                argv.append(name if value else "--no-" + name[2:])
        elif value is not None:
            # One word with "=": a list must not swallow the words that follow it.
            text = json.dumps(value, default=str) if isinstance(value, list | dict) else str(value)
            argv.append(f"{name}={text}")
    return argv


def _read_yaml(path: str) -> dict[Any, Any]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"--config {path}: not valid YAML{where}: {getattr(error, 'problem', error)}.") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: must map flag names to values.")
    return values
