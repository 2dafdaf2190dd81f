"""Tokenizers on the `tokenizers` library, and the files of a Hugging Face directory that describe one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, processors

from vllm_clone.errors import ConfigError, RequestError
from vllm_clone.hub import read_json
from vllm_clone.tokenizers.base import CONTEXT_TOKENS, DecodeStream, Tokenizer, split_open_character

SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
LONG_TEXT = 2048
"""Characters from which a text is encoded without the interpreter lock."""
MAX_ID = 2**32
"""The library's ids are unsigned 32-bit numbers."""


class FastTokenizer(Tokenizer):
    """A Rust tokenizer plus the few facts around it. Encoding a long text releases the interpreter lock."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        name: str,
        special: dict[str, str],
        chat_template: str | dict[str, str] | None,
        settings: dict[str, Any],
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.name = name
        self.special = special
        self.chat_template = chat_template
        self._settings = settings
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.added_ids = frozenset(added)
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self._byte_level = "ByteLevel" in repr(backend.decoder)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        try:
            if len(text) > LONG_TEXT:  # only a batch is encoded without Python's lock
                return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise RequestError("The text is not valid Unicode: it holds half of a surrogate pair.") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode([i for i in ids if 0 <= i < MAX_ID], skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        lookup = self._backend.id_to_token
        return [lookup(i) or "" if 0 <= i < MAX_ID else "" for i in ids]

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def new_decode_stream(
        self,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> DecodeStream:
        stream = _FastStream(self._backend, prompt_ids, skip_special_tokens)
        if spaces_between_special_tokens or skip_special_tokens:
            return stream
        return BareAddedTokens(self, stream)

    def init_settings(self) -> dict[str, Any]:
        return self._settings

    @property
    def _is_byte_level(self) -> bool:
        return self._byte_level


class _FastStream(DecodeStream):
    def __init__(self, backend: tokenizers.Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip = skip_special_tokens
        known = [i for i in prompt_ids[-max(CONTEXT_TOKENS) :] if 0 <= i < MAX_ID]
        whole, begun = split_open_character(
            known, lambda ids: backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        )
        self._stream = decoders.DecodeStream(ids=list(whole), skip_special_tokens=skip_special_tokens)
        for token_id in begun:
            self.step(token_id)

    def step(self, token_id: int) -> str | None:
        if not 0 <= token_id < MAX_ID:
            return None
        try:
            return self._stream.step(self._backend, token_id)
        except Exception as error:  # the library raises a bare Exception
            if "nvalid prefix" not in str(error):
                raise
        # The id changed text that was already out (byte fallback can); go on from it alone.
        self._stream = decoders.DecodeStream(ids=[], skip_special_tokens=self._skip)
        return self._stream.step(self._backend, token_id)


class BareAddedTokens(DecodeStream):
    """Gives an added token right after another one its own text, without the decoder's space before it."""

    def __init__(self, tokenizer: Tokenizer, stream: DecodeStream) -> None:
        self._tokenizer = tokenizer
        self._stream = stream
        self._after_added = False

    def step(self, token_id: int) -> str | None:
        text = self._stream.step(token_id)
        is_added = token_id in self._tokenizer.added_ids
        if is_added and self._after_added:
            text = self._tokenizer.convert_ids_to_tokens([token_id])[0]
        self._after_added = is_added
        return text


def from_directory(path: Path) -> FastTokenizer:
    """tokenizer.json with tokenizer_config.json and the chat template files beside it.

    Raises:
        ConfigError: a file is damaged.
    """
    file = path / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        raise ConfigError(f"{file} is not a readable tokenizer: {error}") from error
    settings = _optional_json(path / "tokenizer_config.json")
    special_map = _optional_json(path / "special_tokens_map.json") | settings
    special = {role: text for role in SPECIAL_ROLES if (text := _token_text(special_map.get(role))) is not None}
    _add_missing_tokens(backend, special_map, special)
    if backend.post_processor is None or {"add_bos_token", "add_eos_token"} & settings.keys():
        frame(
            backend,
            special.get("bos_token") if settings.get("add_bos_token") else None,
            special.get("eos_token") if settings.get("add_eos_token") else None,
        )
    template = _chat_template(path, settings)
    return FastTokenizer(backend, path.name, special, template, settings | {"chat_template": template})


def frame(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Make encoding with special tokens put ``bos`` before and ``eos`` after the text; None puts nothing."""
    ends = {text: backend.token_to_id(text) for text in (bos, eos) if text is not None}
    parts = [f"{bos}:0" if bos is not None else "", "$A:0", f"{eos}:0" if eos is not None else ""]
    backend.post_processor = processors.TemplateProcessing(
        single=list(filter(None, parts)), special_tokens=list(ends.items())
    )


def _add_missing_tokens(backend: tokenizers.Tokenizer, settings: dict[str, Any], special: dict[str, str]) -> None:
    """Register added tokens that only tokenizer_config.json names, and special ones that are mere vocabulary."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = sorted((settings.get("added_tokens_decoder") or {}).items(), key=lambda item: int(item[0]))
    backend.add_tokens([AddedToken(**_flags(entry)) for _, entry in listed if entry["content"] not in known])
    known |= {entry["content"] for _, entry in listed}
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    texts = [*special.values(), *filter(None, map(_token_text, extra.values() if isinstance(extra, dict) else extra))]
    missing = [t for t in dict.fromkeys(texts) if t not in known and backend.token_to_id(t) is not None]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in missing])


def _flags(entry: dict[str, Any]) -> dict[str, Any]:
    return {k: entry[k] for k in ("content", "single_word", "lstrip", "rstrip", "normalized", "special") if k in entry}


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _token_text(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _chat_template(path: Path, settings: dict[str, Any]) -> str | dict[str, str] | None:
    jinja = path / "chat_template.jinja"
    if jinja.exists():
        extra = {f.stem: f.read_text("utf-8") for f in sorted(path.glob("additional_chat_templates/*.jinja"))}
        text = jinja.read_text("utf-8")
        return {"default": text, **extra} if extra else text
    legacy = path / "chat_template.json"
    template = read_json(legacy).get("chat_template") if legacy.exists() else settings.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}
    return template
