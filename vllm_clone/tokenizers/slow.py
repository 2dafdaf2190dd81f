"""Tokenizers that only transformers can build; importing this module costs seconds."""

from collections.abc import Sequence
from typing import Any

from transformers import AutoTokenizer

from vllm_clone.errors import ConfigError, RequestError
from vllm_clone.hub.files import is_offline
from vllm_clone.tokenizers.base import CONTEXT_TOKENS, REPLACEMENT, DecodeStream, Tokenizer, split_open_character
from vllm_clone.tokenizers.fast import SPECIAL_ROLES, BareAddedTokens

WINDOW = max(CONTEXT_TOKENS)


class SlowTokenizer(Tokenizer):
    """Any transformers tokenizer behind our interface."""

    def __init__(self, path: str, trust_remote_code: bool) -> None:
        try:
            self._hf = AutoTokenizer.from_pretrained(
                path, trust_remote_code=trust_remote_code, local_files_only=is_offline()
            )
        except Exception as error:  # each kind of tokenizer fails in its own way
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ConfigError(f"No tokenizer can be built from {path}: {reason}") from error
        self.name = path
        self._vocab = self._hf.get_vocab()
        self.vocab_size = len(self._hf)
        self.special = {r: str(t) for r in SPECIAL_ROLES if (t := getattr(self._hf, r, None)) is not None}
        self.special_ids = frozenset(self._hf.all_special_ids)
        self.added_ids = frozenset(self._hf.get_added_vocab().values()) | self.special_ids
        self.chat_template = self._hf.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            return list(self._hf.encode(text, add_special_tokens=add_special_tokens))
        except (TypeError, UnicodeEncodeError) as error:
            raise RequestError("The text is not valid Unicode: it holds half of a surrogate pair.") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        valid = [i for i in ids if 0 <= i < self.vocab_size]
        return str(self._hf.decode(valid, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False))

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return [str(self._hf.convert_ids_to_tokens(i) or "") if 0 <= i < self.vocab_size else "" for i in ids]

    def token_to_id(self, token: str) -> int | None:
        return self._vocab.get(token)

    def new_decode_stream(
        self,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> DecodeStream:
        stream = _SlowStream(self, prompt_ids, skip_special_tokens)
        if spaces_between_special_tokens or skip_special_tokens:
            return stream
        return BareAddedTokens(self, stream)

    def init_settings(self) -> dict[str, Any]:
        return {"tokenizer_class": type(self._hf).__name__, **self.special, "chat_template": self.chat_template}

    @property
    def _is_byte_level(self) -> bool:
        return "Ġ" in self._vocab


class _SlowStream(DecodeStream):
    """Decodes a short window twice per id; what the longer text adds is new, unless it ends in half a character."""

    def __init__(self, tokenizer: SlowTokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        whole, begun = split_open_character(
            prompt_ids[-WINDOW:], lambda ids: tokenizer.decode(ids, skip_special_tokens)
        )
        self._ids = [*whole, *begun]
        self._read = len(whole)

    def step(self, token_id: int) -> str | None:
        if not 0 <= token_id < self._tokenizer.vocab_size:
            return None
        self._ids.append(token_id)
        before = self._tokenizer.decode(self._ids[: self._read], self._skip)
        after = self._tokenizer.decode(self._ids, self._skip)
        if len(after) <= len(before) or after.endswith(REPLACEMENT):
            return None
        # The last piece alone is context enough: decoding from its start keeps the rules for leading spaces.
        self._ids, self._read = self._ids[self._read :], len(self._ids) - self._read
        return after[len(before) :]
