"""What the server asks of a tokenizer, whatever library does the work."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

CONTEXT_TOKENS = 8
"""Prompt tokens that prime a decode stream; more would not change what comes after them."""


class DecodeStream(ABC):
    """Turns ids into text one at a time."""

    @abstractmethod
    def step(self, token_id: int) -> str | None:
        """Text that became certain with this id; None while it ends in half a character."""


class Tokenizer(ABC):
    """Text ↔ ids. Thread-safe: encoding may run in a thread pool.

    Attributes:
        vocab_size: number of ids, added tokens included.
        special: name of each special token role (``bos_token`` …) → its text.
        special_ids: ids whose text ``skip_special_tokens`` leaves out.
        chat_template: the template, templates by name, or None.
    """

    name: str
    vocab_size: int
    special: dict[str, str]
    special_ids: frozenset[int]
    chat_template: str | dict[str, str] | None

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; ids outside the vocabulary have none."""

    @abstractmethod
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Raw vocabulary strings; ids outside the vocabulary give ''."""

    @abstractmethod
    def token_to_id(self, token: str) -> int | None: ...

    @abstractmethod
    def new_decode_stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> DecodeStream: ...

    @abstractmethod
    def init_settings(self) -> dict[str, Any]:
        """What the tokenizer was built from, for /tokenizer_info."""

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, also when they are no whole characters."""
        token = self.convert_ids_to_tokens([token_id])[0]
        if token_id in self.special_ids:
            return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        if self._is_byte_level and all(c in byte_alphabet() for c in token):
            return bytes(byte_alphabet()[c] for c in token)
        return token.replace("▁", " ").encode()

    @cached_property
    def max_chars_per_token(self) -> int:
        """Longest vocabulary string; no token stands for more characters of text."""
        return max((len(t) for t in self.convert_ids_to_tokens(range(self.vocab_size))), default=1)

    @property
    @abstractmethod
    def _is_byte_level(self) -> bool: ...

    def _special_id(self, role: str) -> int | None:
        token = self.special.get(role)
        return None if token is None else self.token_to_id(token)


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable bytes stand for themselves, the others from U+0100 on.

    Defined by GPT-2's tokenizer.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = (b for b in range(256) if b not in set(printable))
    return table | {chr(0x100 + i): b for i, b in enumerate(others)}
