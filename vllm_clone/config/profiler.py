"""--profiler-config: what POST /start_profile records."""

from typing import Any, Literal

import msgspec

from vllm_clone.errors import ConfigError


class ProfilerOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Keys of the flag's JSON object."""

    profiler: Literal["torch"]
    torch_profiler_dir: str
    """Where traces are written."""
    torch_profiler_with_stack: bool = True
    torch_profiler_with_flops: bool = False
    torch_profiler_use_gzip: bool = True
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    delay_iterations: int = 0
    """Steps after the start that are not recorded."""
    max_iterations: int = 0
    """Steps after which recording ends by itself; 0 = none."""


def profiler_options(value: dict[str, Any]) -> ProfilerOptions | None:
    """None without the flag.

    Raises:
        ConfigError: an unknown key, or a value that no key takes.
    """
    if not value:
        return None
    try:
        options = msgspec.convert(value, ProfilerOptions)
        if min(options.delay_iterations, options.max_iterations) < 0:
            raise ValueError("iterations must be at least 0")
        if not options.torch_profiler_dir:
            raise ValueError("torch_profiler_dir must name a directory")
    except ValueError as error:
        known = ", ".join(ProfilerOptions.__struct_fields__)
        raise ConfigError(
            f"--profiler-config: {error}; the torch profiler writes to torch_profiler_dir, and the keys are {known}."
        ) from error
    return options
