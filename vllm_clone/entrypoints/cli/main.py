"""`vllm`: finds the command, parses its flags, runs it. A user's mistake ends in one line, never in a traceback."""

import importlib
import sys
from collections.abc import Sequence
from typing import Protocol

from vllm_clone.errors import ConfigError, EngineDeadError, ModelLoadError
from vllm_clone.utils.flag_parser import FlagParser, UsageError
from vllm_clone.version import VLLM_INTERFACE_VERSION, __version__


class Command(Protocol):
    """What a command's module offers."""

    HELP: str
    USAGE: str

    def add_arguments(self, parser: FlagParser) -> None: ...
    def run(self, args: object) -> int: ...


COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("Serve a model over HTTP with the OpenAI API.", "vllm_clone.entrypoints.cli.serve"),
    "chat": ("Talk to a chat model on a running server.", "vllm_clone.entrypoints.cli.chat"),
    "complete": ("Complete a text with a model on a running server.", "vllm_clone.entrypoints.cli.complete"),
    "collect-env": ("Print what a bug report needs to know of this machine.", "vllm_clone.entrypoints.cli.collect_env"),
}
"""Command → what it does and the module that does it; the module is imported only when it runs."""

NOT_YET = ("bench", "run-batch", "launch", "snapshot", "preload", "download-kernels")
"""Commands of vLLM that do not exist here yet; they say so instead of pretending."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code: 0 fine, 1 trouble with the environment, 2 a wrong command line."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0 if argv else 2
    if argv[0] in ("-v", "--version"):
        print(f"{__version__} (interface of vLLM {VLLM_INTERFACE_VERSION})")
        return 0
    name, rest = argv[0], argv[1:]
    if name in NOT_YET:
        return _fail(f"the command {name} is not implemented yet; {_known()}", 2)
    if name not in COMMANDS:
        return _fail(f"unknown command {name!r}; {_known()}", 2)
    try:
        module = importlib.import_module(COMMANDS[name][1])
        parser = FlagParser(f"vllm {name}", getattr(module, "USAGE", f"vllm {name} [options]"), COMMANDS[name][0])
        module.add_arguments(parser)
        prepare = getattr(module, "prepare_argv", list)
        return int(module.run(parser.parse(prepare(rest))))
    except (UsageError, ConfigError) as error:
        return _fail(str(error), 2)
    except (ModelLoadError, EngineDeadError) as error:
        return _fail(str(error), 1)
    except OSError as error:
        return _fail(str(error), 1)
    except KeyboardInterrupt:
        return 130


def _overview() -> str:
    lines = ["usage: vllm [-h] [-v] COMMAND [options]", "", "Commands:"]
    lines += [f"  {name:<14}{text}" for name, (text, _) in COMMANDS.items()]
    return "\n".join([*lines, "", "vllm COMMAND --help tells more about one of them."])


def _known() -> str:
    return "known commands: " + ", ".join(COMMANDS)


def _fail(message: str, code: int) -> int:
    sys.stdout.flush()
    print(f"vllm: error: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
