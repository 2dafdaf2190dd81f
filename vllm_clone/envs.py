"""The only module that reads the environment. Each attribute is read when it is used.

``VARIABLES`` says what each name means; unknown ``VLLM_*`` names are reported at start. An empty variable counts as
unset.
"""

import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_LAST_CORE = (1 << 16) - 1
LOG_LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")


class Variable(NamedTuple):
    """What an environment variable means."""

    parse: Callable[[str], Any]
    """Text → value; raises ValueError with the rule that the text breaks."""
    default: Any
    help: str


def _whole(text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError("must be a whole number, at least 0")
    return int(text)


def _seconds(text: str) -> float:
    """Also used for sizes: a finite number, at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError("must be a number, at least 0")
    return value


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ValueError("must be a number of seconds") from None
    return value if 0 < value < float("inf") else 10.0


def _switch(text: str) -> bool:
    word = text.strip().lower()
    if word not in TRUE + FALSE:
        raise ValueError("must be 1 or 0")
    return word in TRUE


def _hub_switch(text: str) -> bool:
    """As the hub's own library reads it: what is not true is false."""
    return text.strip().lower() in TRUE


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        found = next((c for c in choices if c.lower() == text.strip().lower()), None)
        if found is None:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return found

    return parse


def core_list(text: str) -> list[int]:
    """``0-3,8`` → [0, 1, 2, 3, 8]: numbers and ranges that end no lower than they begin, each core once.

    Raises:
        ValueError: with the rule that the text breaks.
    """
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError("must be core numbers and ranges such as 0-3,8")
        end = int(last) if dash else int(first)
        if end < int(first):
            raise ValueError(f"the range {part.strip()} descends")
        if end > _LAST_CORE:
            raise ValueError(f"no core has the number {end}")
        cores += range(int(first), end + 1)
    if len(set(cores)) < len(cores):
        raise ValueError("a core is named twice")
    return cores


def _core_lists(text: str) -> str | list[list[int]]:
    word = text.strip().lower()
    if word in ("auto", "nobind"):
        return word
    if not re.fullmatch(r"[0-9,|\s-]+", text):
        raise ValueError("must be auto, nobind, or cores such as 0-3 or 0,2-5, with | between the lists of ranks")
    return [core_list(part) for part in text.split("|")]


VARIABLES: dict[str, Variable] = {
    "VLLM_API_KEY": Variable(str, None, "API key that clients must send when there is no --api-key."),
    "VLLM_CONFIGURE_LOGGING": Variable(_switch, True, "0 leaves the logging module as it is."),
    "VLLM_LOGGING_LEVEL": Variable(_one_of(*LOG_LEVELS), "INFO", "Level of the vllm loggers."),
    "VLLM_LOGGING_PREFIX": Variable(str, "", "Text in front of every log line."),
    "VLLM_LOGGING_STREAM": Variable(
        _one_of("ext://sys.stdout", "ext://sys.stderr"), "ext://sys.stdout", "Where log lines go."
    ),
    "VLLM_LOGGING_CONFIG_PATH": Variable(str, None, "JSON file for logging.config.dictConfig, instead of our own."),
    "VLLM_LOGGING_COLOR": Variable(_one_of("auto", "1", "0"), "auto", "Colours in logs; auto: on a terminal."),
    "VLLM_LOG_STATS_INTERVAL": Variable(_interval, 10.0, "Seconds between statistics lines."),
    "VLLM_DISABLE_LOG_LOGO": Variable(_switch, False, "One plain line instead of the banner."),
    "VLLM_MAX_N_SEQUENCES": Variable(_whole, 16384, "Largest accepted n."),
    "VLLM_MAX_STOP_STRINGS": Variable(_whole, 4, "Most stop strings in one HTTP request."),
    "VLLM_MAX_NUM_BAD_WORDS": Variable(_whole, 128, "Most token sequences bad_words may give."),
    "VLLM_MAX_COMPLETION_PROMPTS": Variable(_whole, 1024, "Most prompts in one completion."),
    "VLLM_CPU_KVCACHE_SPACE": Variable(_seconds, 0.0, "KV cache size on CPU in GiB; 0 = automatic."),
    "VLLM_CPU_ISA": Variable(
        _one_of("amx", "avx512_bf16", "avx512", "avx2", "portable", "amx_emulated"),
        None,
        "Force the level of the CPU kernels; amx_emulated is for tests.",
    ),
    "VLLM_CPU_THREADS": Variable(_whole, 0, "Threads of the CPU kernels; 0 = all cores of this process."),
    "VLLM_CPU_OMP_THREADS_BIND": Variable(
        _core_lists,
        "auto",
        "Cores that the threads of the CPU kernels stay on, such as 0-3 or 0,2; lists for several ranks are separated "
        "by |. auto, nobind: a thread for each core of this process, moved by the operating system.",
    ),
    "VLLM_CPU_NUM_OF_RESERVED_CPU": Variable(
        _whole, 0, "How many of this process's cores, the last ones, the engine leaves free; with auto only."
    ),
    "VLLM_ENGINE_HEALTH_TIMEOUT": Variable(
        _seconds, 30.0, "Seconds without a turn of the engine loop until /health says 503."
    ),
    "VLLM_ENGINE_READY_TIMEOUT_S": Variable(_seconds, 600.0, "Longest engine start in seconds."),
    "VLLM_REGEX_COMPILATION_TIMEOUT_S": Variable(
        _seconds, 5.0, "Longest time in seconds for compiling a request's regex, schema or grammar; 0 = no limit."
    ),
    "VLLM_XGRAMMAR_CACHE_MB": Variable(_whole, 512, "Memory in MiB for compiled grammars, of either library."),
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": Variable(_switch, False, "Allow lengths above the model's."),
    "VLLM_SERVER_DEV_MODE": Variable(_switch, False, "Serve POST /collective_rpc, which no key guards."),
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": Variable(_switch, False, "Answer 503 after engine death."),
    "HF_HUB_OFFLINE": Variable(_hub_switch, False, "Never touch the network for model files."),
    "TRANSFORMERS_OFFLINE": Variable(_hub_switch, False, "Same as HF_HUB_OFFLINE."),
    "OPENAI_API_KEY": Variable(str, None, "API key that the client commands send."),
    "PROMETHEUS_MULTIPROC_DIR": Variable(
        str, None, "Directory in which several API servers share their metrics; a temporary one when not set."
    ),
    "PYTHONHASHSEED": Variable(str, None, "Seeds the root of the block hash chain when set."),
    "NO_COLOR": Variable(str, None, "No colours in logs when set."),
    "FORCE_COLOR": Variable(str, None, "Colours in logs even when they go to no terminal."),
}


def __getattr__(name: str) -> Any:
    """The value of a variable.

    Raises:
        ValueError: its text is no such value; the message names variable, text and rule.
    """
    variable = VARIABLES.get(name)
    if variable is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    text = os.environ.get(name)
    if not text:
        return variable.default
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ValueError(f"{name}={text}: {error}; correct it or unset it.") from error


def export(name: str, value: str) -> None:
    """Set a variable for this process and those it starts."""
    os.environ[name] = value


def forget(name: str) -> None:
    """Unset a variable for this process and those it starts."""
    os.environ.pop(name, None)


def problems() -> list[str]:
    """One line for each variable whose text is not a value it can have."""
    found = []
    for name in VARIABLES:
        try:
            __getattr__(name)
        except ValueError as error:
            found.append(str(error))
    return found


def names_set() -> list[str]:
    """Names of our own and of VLLM_ variables that are set."""
    return [name for name in os.environ if name.startswith("VLLM_") or name in VARIABLES]


def raw(name: str) -> str:
    """A variable's text as it stands in the environment."""
    return os.environ.get(name, "")


def of_engine() -> dict[str, str]:
    """The environment for an engine process: this one's, but no pools of threads beside the kernels' own.

    What is set stays as it is.
    """
    return {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", **os.environ}


def unknown_names() -> list[str]:
    """Set variables that look like ours but mean nothing here, most likely misspelt."""
    return [name for name in os.environ if name.startswith("VLLM_") and name not in VARIABLES]
