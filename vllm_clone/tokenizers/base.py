"""What the server asks of a tokenizer, whatever library does the work."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from typing import Any

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = (8, 64)
"""Prompt tokens that prime a decode stream; the longer window when the shorter one begins inside a character."""
BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""A token of byte fallback."""
MAX_OPEN_BYTES = 3
"""Most bytes of a UTF-8 character that is not complete yet."""


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
        added_ids: ids of tokens that stand for their own text and are matched as a whole; special ones among them.
        chat_template: the template, templates by name, or None.
    """

    name: str
    vocab_size: int
    special: dict[str, str]
    special_ids: frozenset[int]
    added_ids: frozenset[int]
    chat_template: str | dict[str, str] | None

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text.

        Raises:
            RequestError: the text is not valid Unicode.
        """

    @abstractmethod
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids; ids outside the vocabulary have none."""

    @abstractmethod
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Raw vocabulary strings; ids outside the vocabulary give ''."""

    @abstractmethod
    def token_to_id(self, token: str) -> int | None: ...

    @abstractmethod
    def new_decode_stream(
        self,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> DecodeStream:
        """A stream that continues a prompt.

        Args:
            prompt_ids: what comes before; its text is not given out again, but a character that it leaves
                incomplete is, once it is complete.
            skip_special_tokens: give special tokens no text.
            spaces_between_special_tokens: False gives an added token that follows another its bare text,
                without what the tokenizer would put between them.
        """

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
        """The bytes a token stands for, also when they are no whole characters; b'' outside the vocabulary."""
        token = self.convert_ids_to_tokens([token_id])[0]
        if token_id in self.added_ids:
            return token.encode()
        if self._is_byte_level:
            alphabet = byte_alphabet()
            return b"".join(bytes([alphabet[c]]) if c in alphabet else c.encode() for c in token)
        if BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    @cached_property
    def max_chars_per_token(self) -> int:
        """Length of the longest vocabulary string, which bounds the text of n tokens."""
        return max((len(t) for t in self.convert_ids_to_tokens(range(self.vocab_size))), default=1)

    @property
    @abstractmethod
    def _is_byte_level(self) -> bool: ...

    def _special_id(self, role: str) -> int | None:
        token = self.special.get(role)
        return None if token is None else self.token_to_id(token)


def split_open_character(
    prompt_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> tuple[Sequence[int], Sequence[int]]:
    """The end of a prompt as (ids whose text is whole, at most three ids that begin a character).

    Both are empty when the prompt ends in bytes that are no beginning of a character.
    """
    for size in CONTEXT_TOKENS:
        tail = prompt_ids[-size:]
        for num_open in range(min(MAX_OPEN_BYTES, len(tail)) + 1):
            whole = tail[: len(tail) - num_open]
            if not decode(whole).endswith(REPLACEMENT):
                return whole, tail[len(tail) - num_open :]
        if size >= len(prompt_ids):
            break
    return [], []


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE: printable bytes stand for themselves, the others from U+0100 on.

    Defined by GPT-2's tokenizer.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(b): b for b in printable}
    others = (b for b in range(256) if b not in set(printable))
    return table | {chr(0x100 + i): b for i, b in enumerate(others)}
