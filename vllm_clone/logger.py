"""Loggers in vLLM's line format: ``(<Process> pid=<pid>) <LEVEL> <MM-DD HH:MM:SS> [<file>:<line>] <message>``."""

import json
import logging
import logging.config
import os
import sys
from functools import lru_cache

from vllm_clone import envs

_ROOT = "vllm_clone"
_process_name = "APIServer"
_COLOURS = {"WARNING": "\033[33m", "ERROR": "\033[31m", "CRITICAL": "\033[31m"}


def set_process_name(name: str) -> None:
    """Name this process in log lines, for example ``EngineCore``."""
    global _process_name
    _process_name = name


class _Formatter(logging.Formatter):
    """Repeats the prefix on continuation lines; colours levels on a terminal."""

    def __init__(self, colour: bool) -> None:
        super().__init__(datefmt="%m-%d %H:%M:%S")
        self._colour = colour

    def format(self, record: logging.LogRecord) -> str:
        level = record.levelname
        if self._colour and level in _COLOURS:
            level = f"{_COLOURS[level]}{level}\033[0m"
        when = self.formatTime(record, self.datefmt)
        prefix = f"{envs.VLLM_LOGGING_PREFIX}({_process_name} pid={os.getpid()}) {level} {when} "
        prefix += f"[{record.filename}:{record.lineno}] "
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return "\n".join(prefix + line for line in text.splitlines() or [""])


@lru_cache(maxsize=1)
def _configure() -> None:
    """Set up the package's logger once: our own way, from a file, or not at all."""
    if not envs.VLLM_CONFIGURE_LOGGING:
        return
    path = envs.VLLM_LOGGING_CONFIG_PATH
    if path is not None:
        try:
            with open(path, encoding="utf-8") as file:
                logging.config.dictConfig(json.load(file))
        except (OSError, ValueError) as error:
            raise OSError(f"VLLM_LOGGING_CONFIG_PATH={path}: {error}") from error
        return
    stream = sys.stderr if envs.VLLM_LOGGING_STREAM == "ext://sys.stderr" else sys.stdout
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Formatter(_colour_wanted(stream.isatty())))
    root = logging.getLogger(_ROOT)
    root.addHandler(handler)
    root.setLevel(envs.VLLM_LOGGING_LEVEL)
    root.propagate = False


def use_config_file(path: str) -> None:
    """Log as a JSON file for logging.config.dictConfig says, here and in processes started from now on.

    Raises:
        OSError, ValueError: it cannot be read, or is no such configuration.
    """
    with open(path, encoding="utf-8") as file:
        logging.config.dictConfig(json.load(file))
    envs.export("VLLM_LOGGING_CONFIG_PATH", path)


def _colour_wanted(terminal: bool) -> bool:
    if envs.VLLM_LOGGING_COLOR != "auto":
        return bool(envs.VLLM_LOGGING_COLOR == "1")
    return envs.NO_COLOR is None and (terminal or envs.FORCE_COLOR is not None)


def init_logger(name: str) -> logging.Logger:
    """The logger of a module, child of the package's."""
    _configure()
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


_said: set[str] = set()


def log_once(logger: logging.Logger, level: int, message: str) -> None:
    """Log a message the first time it is given, never again in this process."""
    if message not in _said:
        _said.add(message)
        logger.log(level, message)
