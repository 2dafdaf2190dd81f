"""How far a flag can act in this build: the levels, and the one line that refuses what cannot."""

from dataclasses import dataclass
from typing import Literal

Level = Literal["works", "gpu", "extra", "platform", "later"]
LEVELS: dict[Level, str] = {
    "works": "works",
    "gpu": "GPU only",
    "extra": "needs an extra package",
    "platform": "not on this platform",
    "later": "not implemented yet",
}
"""Level → the words that users read."""


@dataclass(frozen=True, slots=True)
class Support:
    """Whether a flag's value other than the default can act, and what to say when it cannot."""

    level: Level
    reason: str = ""
    """Half a sentence, as in "LoRA adapters are not implemented yet"."""
    remedy: str = "leave the flag out"

    def __str__(self) -> str:
        return LEVELS[self.level] + (f": {self.reason}" if self.reason else "")


WORKS = Support("works")


def later(topic: str, remedy: str = "leave the flag out") -> Support:
    """A feature that is yet to be built; ``topic`` is a plural, as in "LoRA adapters"."""
    return Support("later", f"{topic} are not implemented yet", remedy)


def gpu_only(what: str, remedy: str = "leave the flag out on a CPU") -> Support:
    """Something that only a GPU has; ``what`` is a plural."""
    return Support("gpu", f"{what} exist only on a GPU", remedy)


def not_here(reason: str, remedy: str = "leave the flag out") -> Support:
    """Something that this server does not do by design; ``reason`` is a clause."""
    return Support("platform", reason, remedy)
