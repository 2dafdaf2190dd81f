"""A command's parser: flags from config fields, `-` and `_` alike, help by group, near misses named."""

import argparse
import copy
import difflib
import itertools
import json
import re
from collections.abc import Container, Sequence
from typing import Any, NoReturn

from vllm_clone.config.flags import FlagSpec, flags_of
from vllm_clone.entrypoints.cli import config_file, help_page, pieces

SUCCESSORS = {
    "--task": "vllm serve has no --task; use --runner pooling for embedding, rerank and reward models, and "
    "--convert embed, classify or reward to adapt a generative one",
    "--speculative-model": "it is now --spec-model",
    "--num-speculative-tokens": "it is now --spec-tokens",
    "--guided-decoding-backend": "it is now --structured-outputs-config.backend",
    "--enable-reasoning": "it is now --reasoning-parser NAME",
    "--rope-scaling": "it is now --hf-overrides '{\"rope_scaling\": {...}}'",
    "--rope-theta": "it is now --hf-overrides.rope_theta",
    "--cuda-graph-sizes": "it is now --cudagraph-capture-sizes",
    "--num-scheduler-steps": "steps are prepared ahead without it; leave it out",
    "--use-v2-block-manager": "there is one block manager; leave it out",
    "--max-seq-len-to-capture": "it is now --max-cudagraph-capture-size",
    "--disable-async-output-proc": "it is now --no-async-scheduling",
    "--override-pooler-config": "it is now --pooler-config",
    "--disable-mm-preprocessor-cache": "it is now --mm-processor-cache-gb 0",
}
"""Flags that vLLM had once → what does their work."""


class UsageError(Exception):
    """A wrong command line; one line, exit code 2."""


class HelpShown(Exception):
    """Help was asked for and printed; exit code 0."""


class FlagParser(argparse.ArgumentParser):
    """An ArgumentParser whose flags come in groups and whose errors are :class:`UsageError`.

    Names may be written with dashes or underscores, and cut short while they stay unique. JSON flags may come in
    pieces. ``--help`` shows the groups, ``--help=all`` every flag, ``--help=WORD`` a group or the flags whose names
    contain the word.
    """

    def __init__(self, prog: str, usage: str, description: str) -> None:
        super().__init__(prog=prog, usage=usage, description=description, add_help=False, allow_abbrev=True)
        self.usage_line = usage
        self.groups: dict[str, tuple[str, list[argparse.Action]]] = {}
        """Name → (what the flags are about, their actions)."""
        self.warnings: list[str] = []
        """Lines the user should see about a command line that is valid."""
        self.sources: dict[str, str] = {}
        """Field → where the last value of its flag was given."""
        self._specs: dict[str, FlagSpec] = {}
        self._reads_file = False

    def add_config(self, config_class: type, only: Container[str] | None = None) -> None:
        """Add the flags of a config group, or those of some of its fields."""
        summary = (config_class.__doc__ or "").strip().splitlines()[0]
        name = config_class.__name__.replace("FrontendConfig", "Frontend").replace("ServeConfig", "serve")
        self.groups[name] = (summary, self.groups.pop(name, ("", []))[1])  # last, whoever named it before
        for spec in flags_of(config_class):
            if only is not None and spec.field not in only:
                continue
            self._reads_file |= spec.field == "config"
            action = self.add_argument(
                *_names(spec), action=_FlagAction, spec=spec, dest=spec.field, default=argparse.SUPPRESS
            )
            self._specs.update(dict.fromkeys((spec.name, *spec.aliases), spec))
            self.groups.setdefault(spec.heading or name, ("", []))[1].append(action)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse a command line, and the file that ``--config`` names. Flags not given leave no attribute.

        Raises:
            HelpShown: the line asks for help, wherever it does.
            UsageError: an unknown flag, a missing or a wrong value.
            ConfigError: the file cannot be used.
        """
        for arg in argv:
            if any("\ud800" <= c <= "\udfff" for c in arg):  # bytes of the command line that are no UTF-8
                raise UsageError(f"argument {arg!a} is not valid UTF-8")
        argv = [_with_dashes(a) for a in argv]
        for arg in itertools.takewhile(lambda a: a != "--", argv):
            if arg in ("-h", "--help") or arg.startswith("--help="):
                help_page.show(self, arg.partition("=")[2])
                raise HelpShown
        path = config_file.named_file(argv) if self._reads_file else None
        namespace = argparse.Namespace()
        if path is not None:
            one_way = frozenset(s.name for s in self._specs.values() if s.one_way or s.kind == "switch_or_str")
            words = config_file.flags_in(path, one_way)
            try:
                self._parse_source(words, namespace, f"--config {path}")
            except UsageError as error:
                raise UsageError(f"--config {path}: {error}") from error
        self._parse_source(argv, namespace, "command line")
        return namespace

    def _parse_source(self, argv: Sequence[str], onto: argparse.Namespace, source: str) -> None:
        """Parse one source of flags; what it gives replaces what is there, and pieces are laid over that."""
        try:
            words, laid = pieces.split(argv, self._takes_pieces)
        except ValueError as error:
            raise UsageError(str(error)) from error
        given, rest = self.parse_known_args(words)
        if rest:
            raise UsageError(self._unknown(rest[0]))
        vars(onto).update(vars(given))
        self.sources |= dict.fromkeys([*vars(given), *(piece.spec.field for piece in laid)], source)
        for piece in laid:
            field = piece.spec.field
            value = copy.deepcopy(getattr(onto, field, None))
            try:
                value = pieces.lay_over(value, piece)
                setattr(onto, field, piece.spec.check(value, from_text=True) if not piece.keys else value)
            except ValueError as error:
                raise UsageError(str(error)) from error

    def _takes_pieces(self, name: str) -> FlagSpec | None:
        spec = self._specs.get(name)
        return spec if spec is not None and spec.kind in ("json", "list") else None

    def error(self, message: str) -> NoReturn:
        switch = re.fullmatch(r"argument (--[\w-]+)\S*: ignored explicit argument .*", message)
        if switch is not None:
            name = switch[1]
            no_form = f" or --no-{name[2:]}" if f"--no-{name[2:]}" in self.flag_names() else ""
            message = f"{name} takes no value; write {name}{no_form}"
        raise UsageError(message.removeprefix("argument "))

    def flag_names(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]

    def _unknown(self, arg: str) -> str:
        if not arg.startswith("-"):
            return f"unexpected argument {arg!r}; see {self.prog} --help"
        name = arg.split("=")[0]
        head = name.split(".")[0]
        spec = self._specs.get(head)
        if spec is not None and head != name:
            return f"{name}: {spec.name} takes {spec.type_name}, no JSON object; leave the dot out"
        if self._specs and name in SUCCESSORS:
            return f"unknown flag {name}; {SUCCESSORS[name]}"
        near = difflib.get_close_matches(head, self.flag_names(), n=3, cutoff=0.6)
        hint = f"did you mean {' or '.join(near)}?" if near else f"{self.prog} --help=all lists all flags"
        return f"unknown flag {name}; {hint}"


def _names(spec: FlagSpec) -> list[str]:
    """All ways to write a flag, the ``--no-`` form of a switch last."""
    names = [spec.name, *spec.aliases]
    if spec.field == "optimization_level":
        names.append("-O")
    if spec.kind == "bool" and not spec.one_way:
        names += ["--no-" + name[2:] for name in names if name.startswith("--")]
    return names


class _FlagAction(argparse.Action):
    """One flag of a config group: words → the value that its field's type asks for."""

    def __init__(self, option_strings: Sequence[str], dest: str, spec: FlagSpec, default: Any) -> None:
        self.spec = spec
        words: dict[str, Any] = {"bool": 0, "list": "+", "switch_or_str": "?"}
        nargs = words.get(spec.kind)
        shown = None if nargs == 0 else help_page.metavar(spec)
        super().__init__(option_strings, dest, nargs, default=default, metavar=shown, help=help_page.described(spec))

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: Any = None
    ) -> None:
        spec = self.spec
        if values == [] and self.nargs != 0:  # argparse takes a "--" away, even one after "="
            raise UsageError(f"{spec.name}: expected a value")
        before = getattr(namespace, self.dest, None)
        if spec.kind == "bool":
            value: Any = not str(option_string).startswith("--no-")
        elif spec.kind == "list":
            value = _list_of(spec, values)
            value = [*(before or []), *value] if spec.repeatable else value
        elif spec.kind == "switch_or_str" and values is None:
            value = True
        else:
            value = _value_of(spec, values)
        if hasattr(namespace, self.dest) and not spec.repeatable and isinstance(parser, FlagParser):
            parser.warnings.append(f"{spec.name} is given more than once; the last one counts.")
        setattr(namespace, self.dest, value)


def _list_of(spec: FlagSpec, words: list[str]) -> Any:
    """Words, or one JSON list, as the list that the flag's type asks for."""
    if spec.nullable and words in ([""], ["None"]):
        return None
    items: Any = words
    if len(words) == 1 and words[0].startswith("["):
        items = _json(spec, words[0])
    shown = json.dumps(items)
    try:
        if spec.parse is not None:
            parsed = [spec.parse(item) if isinstance(item, str) else item for item in items]
            items = [x for part in parsed for x in (part if isinstance(part, list) else [part])]
        items = spec.check(items, from_text=True)
    except (ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{spec.name} {shown}: {error}") from error
    return items


def _value_of(spec: FlagSpec, text: str) -> Any:
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
