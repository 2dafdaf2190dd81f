"""Where this server answers otherwise than the recorded one, why, and what it answers instead."""

from typing import NamedTuple


class Difference(NamedTuple):
    """Our answer; ``type`` and ``param`` of the error object when there is one."""

    reason: str
    status: int
    type: str | None = None
    param: str | None = None


DIFFERENCES: dict[tuple[str, str], Difference] = {}
