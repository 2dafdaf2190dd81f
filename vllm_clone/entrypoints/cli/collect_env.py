"""`vllm collect-env`: the facts a bug report needs."""

import argparse
import importlib.metadata
import platform
import sys
from collections.abc import Iterator

from vllm_clone import envs
from vllm_clone.entrypoints.cli.parser import FlagParser
from vllm_clone.platforms.cpu import available_memory, num_usable_cores, total_memory
from vllm_clone.version import VLLM_INTERFACE_VERSION, __version__

PACKAGES = (
    "torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface_hub", "fastapi", "uvicorn", "pydantic",
    "msgspec", "pyzmq", "prometheus_client", "numpy", "nanobind",
)  # fmt: skip
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD", "API", "ACCESS", "CREDENTIAL")
INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "sve")


def add_arguments(parser: FlagParser) -> None:
    """It takes none."""


def run(args: argparse.Namespace) -> int:
    for name, value in facts():
        print(f"{name + ':':<24}{value}")
    return 0


def facts() -> Iterator[tuple[str, str]]:
    """Name and value of each fact, in the order shown."""
    yield "vllm_clone", f"{__version__} (interface of vLLM {VLLM_INTERFACE_VERSION})"
    yield "operating system", platform.platform()
    yield "python", sys.version.replace("\n", " ")
    yield "processor", _cpuinfo("model name") or platform.processor() or platform.machine()
    flags = set(_cpuinfo("flags").split())
    yield "instruction sets", " ".join(s for s in INSTRUCTION_SETS if s in flags) or "unknown"
    yield "usable cores", str(num_usable_cores())
    yield "memory", f"{available_memory() / 2**30:.1f} of {total_memory() / 2**30:.1f} GiB available"
    try:
        from vllm_clone.kernels.cpu import ops

        yield "cpu kernels", f"{ops.active_level()} of {' '.join(ops.available_levels())}"
        yield "amx tiles", ops.amx_state() or "not in this processor"
    except ImportError as error:
        yield "cpu kernels", f"not built: {error}"
    for package in PACKAGES:
        try:
            yield package, importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            yield package, "not installed"
    for name in sorted(envs.names_set()):
        hidden = any(word in name for word in SECRETS)
        yield name, "***" if hidden else envs.raw(name)


def _cpuinfo(key: str) -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == key:
                    return value.strip()
    except OSError:
        pass
    return ""
