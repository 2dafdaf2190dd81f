"""The only module that reads the environment. Each attribute is read when it is used.

``VARIABLES`` maps a name to its parser and its meaning; unknown ``VLLM_*`` names are reported at start.
"""

import os
from collections.abc import Callable
from typing import Any


def _int(name: str, default: int) -> Callable[[], int]:
    return lambda: int(os.environ.get(name) or default)


def _float(name: str, default: float) -> Callable[[], float]:
    return lambda: float(os.environ.get(name) or default)


def _str(name: str, default: str | None) -> Callable[[], str | None]:
    return lambda: os.environ.get(name, default)


def _bool(name: str, default: bool = False) -> Callable[[], bool]:
    return lambda: os.environ.get(name, str(default)).strip().lower() in ("1", "true", "yes", "on")


VARIABLES: dict[str, tuple[Callable[[], Any], str]] = {
    "VLLM_API_KEY": (_str("VLLM_API_KEY", None), "API key that clients must send, next to --api-key."),
    "VLLM_LOGGING_LEVEL": (_str("VLLM_LOGGING_LEVEL", "INFO"), "Level of the vllm loggers."),
    "VLLM_LOGGING_PREFIX": (_str("VLLM_LOGGING_PREFIX", ""), "Text in front of every log line."),
    "VLLM_LOGGING_STREAM": (_str("VLLM_LOGGING_STREAM", "ext://sys.stdout"), "Where log lines go."),
    "VLLM_LOG_STATS_INTERVAL": (_float("VLLM_LOG_STATS_INTERVAL", 10.0), "Seconds between statistics lines."),
    "VLLM_DISABLE_LOG_LOGO": (_bool("VLLM_DISABLE_LOG_LOGO"), "One plain line instead of the banner."),
    "VLLM_MAX_N_SEQUENCES": (_int("VLLM_MAX_N_SEQUENCES", 16384), "Largest accepted n."),
    "VLLM_MAX_STOP_STRINGS": (_int("VLLM_MAX_STOP_STRINGS", 4), "Most stop strings in one HTTP request."),
    "VLLM_MAX_NUM_BAD_WORDS": (_int("VLLM_MAX_NUM_BAD_WORDS", 128), "Most token sequences bad_words may give."),
    "VLLM_MAX_COMPLETION_PROMPTS": (_int("VLLM_MAX_COMPLETION_PROMPTS", 1024), "Most prompts in one completion."),
    "VLLM_SERVER_DEV_MODE": (_bool("VLLM_SERVER_DEV_MODE"), "Serve the development endpoints."),
    "VLLM_CPU_KVCACHE_SPACE": (_float("VLLM_CPU_KVCACHE_SPACE", 0.0), "KV cache size on CPU in GiB; 0 = automatic."),
    "VLLM_CPU_ISA": (
        _str("VLLM_CPU_ISA", None),
        "Force the CPU kernels' level: avx512_bf16, avx512, avx2 or portable.",
    ),
    "VLLM_CPU_THREADS": (_int("VLLM_CPU_THREADS", 0), "Threads of the CPU kernels; 0 = all cores of this process."),
    "VLLM_ENGINE_HEALTH_TIMEOUT": (
        _float("VLLM_ENGINE_HEALTH_TIMEOUT", 30.0),
        "Seconds without a turn of the engine loop until /health says 503.",
    ),
    "VLLM_ENGINE_READY_TIMEOUT_S": (_float("VLLM_ENGINE_READY_TIMEOUT_S", 600.0), "Longest engine start in seconds."),
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": (_bool("VLLM_ALLOW_LONG_MAX_MODEL_LEN"), "Allow lengths above the model's."),
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": (_bool("VLLM_KEEP_ALIVE_ON_ENGINE_DEATH"), "Answer 503 after engine death."),
    "HF_HUB_OFFLINE": (_bool("HF_HUB_OFFLINE"), "Never touch the network for model files."),
    "TRANSFORMERS_OFFLINE": (_bool("TRANSFORMERS_OFFLINE"), "Same as HF_HUB_OFFLINE."),
    "OPENAI_API_KEY": (_str("OPENAI_API_KEY", None), "API key that the client commands send."),
    "PYTHONHASHSEED": (_str("PYTHONHASHSEED", None), "Seeds the root of the block hash chain when set."),
    "NO_COLOR": (_str("NO_COLOR", None), "No colour in logs when set."),
}


def __getattr__(name: str) -> Any:
    try:
        return VARIABLES[name][0]()
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def names_set() -> list[str]:
    """Names of our own and of VLLM_ variables that are set."""
    return [name for name in os.environ if name.startswith("VLLM_") or name in VARIABLES]


def raw(name: str) -> str:
    """A variable's text as it stands in the environment."""
    return os.environ.get(name, "")


def unknown_names() -> list[str]:
    """Set variables that look like ours but mean nothing here, most likely misspelt."""
    return [name for name in os.environ if name.startswith("VLLM_") and name not in VARIABLES]
