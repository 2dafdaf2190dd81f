"""--kv-events-config: where the engine tells routers which prefixes its KV cache holds."""

from typing import Any, Literal

import msgspec

from vllm_clone.errors import ConfigError


class KVEventsOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Keys of the flag's JSON object."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] | None = None
    """zmq when events are on and nothing else is said."""
    endpoint: str = "tcp://*:5557"
    """PUB socket: bound when it has a wildcard or is a file, connected otherwise."""
    replay_endpoint: str | None = None
    """ROUTER socket that repeats batches from a number on."""
    buffer_steps: int = 10_000
    """Batches kept for repeating."""
    hwm: int = 100_000
    """Batches that wait for a slow subscriber before some are lost."""
    max_queue_size: int = 100_000
    """Batches that wait for the publishing thread before some are lost."""
    topic: str = ""


def kv_events_options(value: dict[str, Any] | None) -> KVEventsOptions | None:
    """None when nothing is to be published.

    Raises:
        ConfigError: an unknown key, or a value that no key takes.
    """
    if value is None:
        return None
    try:
        options = msgspec.convert(value, KVEventsOptions)
        if min(options.buffer_steps, options.hwm, options.max_queue_size) < 1:
            raise ValueError("buffer_steps, hwm and max_queue_size must be at least 1")
    except ValueError as error:
        known = ", ".join(KVEventsOptions.__struct_fields__)
        raise ConfigError(f"--kv-events-config: {error}; the keys are {known}.") from error
    if not options.enable_kv_cache_events:
        if options.publisher == "zmq":
            raise ConfigError(
                "--kv-events-config: a publisher needs enable_kv_cache_events true; leave it out for no events."
            )
        return None
    return None if options.publisher == "null" else options
