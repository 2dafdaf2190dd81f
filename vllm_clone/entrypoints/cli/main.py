"""`vllm`: finds the command, parses its flags, runs it. A user's mistake ends in one line, never in a traceback."""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from vllm_clone import envs
from vllm_clone.entrypoints.cli import to_come
from vllm_clone.entrypoints.cli.parser import FlagParser, HelpShown, UsageError
from vllm_clone.errors import ConfigError, EngineDeadError, ModelLoadError
from vllm_clone.version import VLLM_INTERFACE_VERSION, __version__

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("Serve a model over HTTP with the OpenAI API.", "vllm_clone.entrypoints.cli.serve"),
    "chat": ("Talk to a chat model on a running server.", "vllm_clone.entrypoints.cli.chat"),
    "complete": ("Complete a text with a model on a running server.", "vllm_clone.entrypoints.cli.complete"),
    "bench": ("Measure a running server (bench serve).", "vllm_clone.entrypoints.cli.bench"),
    "bench latency": ("Measure how long one batch takes.", "vllm_clone.entrypoints.cli.bench_latency"),
    "bench startup": ("Measure how long an engine takes to be ready.", "vllm_clone.entrypoints.cli.bench_startup"),
    "run-batch": ("Answer the requests of a file, in OpenAI's batch format.", "vllm_clone.entrypoints.cli.run_batch"),
    "completion": ("Print a script that completes flags in a shell.", "vllm_clone.entrypoints.cli.completion"),
    "collect-env": ("Print what a bug report needs to know of this machine.", "vllm_clone.entrypoints.cli.collect_env"),
}
"""Command → what it does and the module that does it, which is imported only when it runs.

The module has ``add_arguments(parser: FlagParser)`` and ``run(args: Namespace) -> exit code``; it may have ``USAGE``
and ``prepare_argv(argv) -> argv``, which edits the words before they are parsed.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code: 0 fine, 1 trouble with the environment, 2 a wrong command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if argv[0] in ("-v", "--version"):
        print(f"{__version__} (interface of vLLM {VLLM_INTERFACE_VERSION})")
        return 0
    try:
        return _run(argv[0], argv[1:])
    except (UsageError, ConfigError) as error:
        return _fail(str(error), 2)
    except BrokenPipeError:  # the reader of our output, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ModelLoadError, EngineDeadError, OSError) as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return 130


def _run(name: str, argv: Sequence[str]) -> int:
    if argv and f"{name} {argv[0]}" in COMMANDS:
        name, argv = f"{name} {argv[0]}", argv[1:]
    if name in to_come.COMMANDS:
        return to_come.refuse(name, argv, to_come.COMMANDS[name])
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        raise UsageError(f"unknown command {name!r}; {f'did you mean {near[0]}?' if near else _known()}")
    if problems := envs.problems():
        raise ConfigError(problems[0])
    parser, module = parser_of(name)
    prepare = getattr(module, "prepare_argv", list)
    try:
        args = parser.parse(prepare(argv))
    except HelpShown:
        sys.stdout.flush()
        return 0
    args.sources = parser.sources
    for warning in parser.warnings:
        print(f"vllm: warning: {warning}", file=sys.stderr)
    return int(module.run(args))


def parser_of(name: str) -> tuple[FlagParser, ModuleType]:
    """The parser of one of :data:`COMMANDS`, and the module that runs it."""
    text, module_name = COMMANDS[name]
    module = importlib.import_module(module_name)
    parser = FlagParser(f"vllm {name}", getattr(module, "USAGE", f"vllm {name} [options]"), text)
    module.add_arguments(parser)
    return parser, module


def _overview() -> str:
    lines = ["usage: vllm [-h] [-v] COMMAND [options]", "", "Commands:"]
    lines += [f"  {name:<14}{text}" for name, (text, _) in COMMANDS.items()]
    lines += ["", "To come:"]
    lines += [f"  {name:<18}{entry.what}" for name, entry in to_come.COMMANDS.items()]
    return "\n".join([*lines, "", "vllm COMMAND --help tells more about one of them."])


def _known() -> str:
    return "known commands: " + ", ".join(COMMANDS)


def _fail(message: str, code: int) -> int:
    """Say what is wrong in one line."""
    sys.stdout.flush()
    print(f"vllm: error: {' '.join(message.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
