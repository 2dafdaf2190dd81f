"""What a data set is asked for, and what several of them do alike."""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_clone.benchmarks.serve.sample import Sample
from vllm_clone.chat import ChatRenderer
from vllm_clone.errors import ConfigError
from vllm_clone.tokenizers import Tokenizer


@dataclass
class Request:
    """Everything a data set may need.

    Attributes:
        flags: values of the flags, which hold what only one set reads.
        tokenizer: None with --skip-tokenizer-init.
        renders_template: prompts become a user's message in the chat template, rendered here.
        warn: prints a line for the user.
    """

    flags: dict[str, Any]
    tokenizer: Tokenizer | None
    renders_template: bool
    warn: Callable[[str], None] = print

    @property
    def count(self) -> int:
        return int(self.flags["num_prompts"])

    @property
    def seed(self) -> int:
        return int(self.flags["seed"])

    @property
    def path(self) -> Path:
        return Path(self.flags["dataset_path"])

    @property
    def words(self) -> Tokenizer:
        """The tokenizer, for sets that cannot do without."""
        assert self.tokenizer is not None, "the flags were checked"
        return self.tokenizer

    def length(self, text: str) -> int:
        """Tokens of a text as a prompt; 1 without a tokenizer."""
        return 1 if self.tokenizer is None else len(self.tokenizer.encode(text))

    def message(self, text: str) -> str:
        """A text as it is sent: inside the chat template, or as it is."""
        if not self.renders_template or self.tokenizer is None:
            return text
        if self.tokenizer.chat_template is None:
            raise ConfigError("The tokenizer has no chat template; add --skip-chat-template.")
        extra = self.flags["chat_template_kwargs"]
        return ChatRenderer(self.tokenizer).render([{"role": "user", "content": text}], chat_template_kwargs=extra)

    def shuffled(self, rows: list[Any]) -> list[Any]:
        """Rows in random order, unless their order is to be kept."""
        if not self.flags["disable_shuffle"]:
            random.Random(self.seed).shuffle(rows)
        return rows

    def enough(self, samples: list[Sample]) -> list[Sample]:
        """As many as were asked for: cut, or with random ones repeated."""
        count = self.count or len(samples)
        missing = count - len(samples)
        if missing > 0 and samples and not self.flags["no_oversample"]:
            again = random.Random(self.seed).choices(samples, k=missing)
            self.warn(f"The data set has {len(samples)} usable rows; random ones are repeated to reach {count}.")
            samples = samples + [replace(s) for s in again]
        return samples[:count]

    def lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """(where, object) of each line of the JSONL file."""
        yield from json_lines(self.path)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"--dataset-path {path}: {reason}.") from error


def json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(``path:line``, object) of each line that is not blank."""
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"--dataset-path {where}: not valid JSON: {error}.") from error
        if not isinstance(row, dict):
            raise ConfigError(f"--dataset-path {where}: must be a JSON object.")
        yield where, row


def field(where: str, row: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    """A field of a row. Raises ConfigError when it is missing or of another type."""
    value = row.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        names = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise ConfigError(f"--dataset-path {where}: needs a field {name!r} of type {names}.")
    return value
