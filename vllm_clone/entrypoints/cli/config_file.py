"""``--config FILE``: YAML with flags, as words of a command line that come before all typed ones."""

import json
from collections.abc import Sequence
from typing import Any

from vllm_clone.errors import ConfigError


def named_file(argv: Sequence[str]) -> str | None:
    """The file after ``--config`` (or ``--config=``), None without one.

    Raises:
        ConfigError: the flag stands twice, or alone.
    """
    found = [i for i, arg in enumerate(argv) if arg == "--config" or arg.startswith("--config=")]
    if not found:
        return None
    if len(found) > 1:
        raise ConfigError("--config may be given once; merge the files.")
    typed = argv[found[0]]
    following = argv[found[0] + 1 : found[0] + 2]
    path = typed.partition("=")[2] if "=" in typed else next(iter(following), "")
    if not path:
        raise ConfigError("--config: no file given; write --config FILE.")
    return path


def flags_in(path: str, without_no_form: frozenset[str]) -> list[str]:
    """The file's entries as words; ``null`` leaves a flag out, ``false`` is its ``--no-`` form.

    ``without_no_form`` names the switches that have none; false for them means leaving them out.

    Raises:
        ConfigError: unreadable, not a mapping, or names another file.
    """
    argv: list[str] = []
    for key, value in _read(path).items():
        head, dot, tail = str(key).partition(".")
        name = "--" + head.replace("_", "-") + dot + tail
        if name == "--config":
            raise ConfigError(f"--config {path}: names another config file; merge the two.")
        if isinstance(value, bool) and not dot:
            if value or name not in without_no_form:
                argv.append(name if value else "--no-" + name[2:])
        elif value is not None:
            # One word with "=": a list must not swallow the words that follow it.
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            argv.append(f"{name}={text}")
    return argv


def _read(path: str) -> dict[Any, Any]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"--config {path}: not valid YAML{where}: {getattr(error, 'problem', error)}.") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: must map flag names to values.")
    return values
