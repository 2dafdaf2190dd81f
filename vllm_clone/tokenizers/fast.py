"""Tokenizers on the `tokenizers` library, from tokenizer.json or straight from GGUF metadata."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from vllm_clone.errors import ConfigError
from vllm_clone.hub import read_json
from vllm_clone.hub.gguf import GGUFFile
from vllm_clone.tokenizers.base import CONTEXT_TOKENS, DecodeStream, Tokenizer

SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


class FastTokenizer(Tokenizer):
    """A Rust tokenizer plus the few facts around it."""

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
        self.vocab_size = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self._byte_level = "ByteLevel" in repr(backend.decoder)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        valid = [i for i in ids if 0 <= i < 2**32]
        return self._backend.decode(valid, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        lookup = self._backend.id_to_token
        return [lookup(i) or "" if 0 <= i < 2**32 else "" for i in ids]

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def new_decode_stream(self, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> DecodeStream:
        return _FastStream(self._backend, prompt_ids, skip_special_tokens)

    def init_settings(self) -> dict[str, Any]:
        return self._settings

    @property
    def _is_byte_level(self) -> bool:
        return self._byte_level


class _FastStream(DecodeStream):
    def __init__(self, backend: tokenizers.Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip = skip_special_tokens
        context = [i for i in prompt_ids[-CONTEXT_TOKENS:] if i < 2**32]
        # The library takes a context that ends within a character for new text; those ids are stepped over instead.
        whole = len(context)
        while whole and backend.decode(context[:whole], skip_special_tokens=skip_special_tokens).endswith("\ufffd"):
            whole -= 1
        self._stream = decoders.DecodeStream(ids=context[:whole], skip_special_tokens=skip_special_tokens)
        for token_id in context[whole:]:
            self.step(token_id)

    def step(self, token_id: int) -> str | None:
        if not 0 <= token_id < 2**32:
            return None
        try:
            return self._stream.step(self._backend, token_id)
        except Exception as error:  # the library raises a bare Exception
            if "nvalid prefix" not in str(error):
                raise
        # The id changed text that was already out (byte fallback can); go on from it alone.
        self._stream = decoders.DecodeStream(ids=[], skip_special_tokens=self._skip)
        return self._stream.step(self._backend, token_id)


def from_directory(path: Path) -> FastTokenizer:
    """tokenizer.json with tokenizer_config.json and the chat template files beside it."""
    file = path / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        raise ConfigError(f"{file} is not a readable tokenizer: {error}") from error
    settings = _optional_json(path / "tokenizer_config.json")
    special_map = _optional_json(path / "special_tokens_map.json") | settings
    special = {role: text for role in SPECIAL_ROLES if (text := _token_text(special_map.get(role))) is not None}
    if "model_max_length" in settings and settings["model_max_length"] > 1e18:
        settings["model_max_length"] = int(1e18)
    return FastTokenizer(backend, path.name, special, _chat_template(path, settings), settings)


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


def from_gguf(path: Path) -> FastTokenizer:
    """The tokenizer that a GGUF file carries.

    Raises:
        ConfigError: no tokenizer, or a kind we cannot rebuild exactly.
    """
    meta = GGUFFile(path).metadata
    kind = meta.get("tokenizer.ggml.model")
    tokens: list[str] = meta.get("tokenizer.ggml.tokens", [])
    if kind == "gpt2":
        backend = _byte_level_bpe(path, meta, tokens)
    elif kind == "llama":
        backend = _sentencepiece_bpe(meta, tokens)
    else:
        raise ConfigError(f"{path}: GGUF tokenizer {kind!r} is not supported; give --tokenizer a directory.")
    types = meta.get("tokenizer.ggml.token_type", [])
    control = [t for t, k in zip(tokens, types, strict=False) if k == _CONTROL]
    user = [t for t, k in zip(tokens, types, strict=False) if k == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    backend.add_tokens([AddedToken(t, normalized=False) for t in user])
    special = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = meta.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            special[f"{role}_token"] = tokens[token_id]
    add_bos = meta.get("tokenizer.ggml.add_bos_token", kind == "llama") and "bos_token" in special
    _set_template(backend, special["bos_token"] if add_bos else None)
    settings = {"tokenizer_class": "GGUF " + str(kind), **special, "chat_template": meta.get("tokenizer.chat_template")}
    return FastTokenizer(backend, path.stem, special, meta.get("tokenizer.chat_template"), settings)


def _set_template(backend: tokenizers.Tokenizer, bos: str | None) -> None:
    if bos is not None:
        pair = (bos, backend.token_to_id(bos))
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[pair])


def _byte_level_bpe(path: Path, meta: dict[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    merges = [tuple(m.split(" ", 1)) for m in meta.get("tokenizer.ggml.merges", [])]
    pre = meta.get("tokenizer.ggml.pre", "default")
    splitters: dict[str, list[Any]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "llama-bpe": _split_then_bytes(_LLAMA3_SPLIT),
        "qwen2": _split_then_bytes(_QWEN2_SPLIT),
    }
    same = {
        "default": "gpt-2",
        "gpt2": "gpt-2",
        "llama3": "llama-bpe",
        "llama-v3": "llama-bpe",
        "deepseek-r1-qwen": "qwen2",
    }
    parts = splitters.get(same.get(pre, pre))
    if parts is None:
        known = ", ".join(sorted([*splitters, *same]))
        raise ConfigError(
            f"{path}: GGUF pre-tokenizer {pre!r} is not known ({known}); give --tokenizer a Hugging Face directory."
        )
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges, ignore_merges=False))
    if same.get(pre, pre) == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(parts) if len(parts) > 1 else parts[0]
    backend.decoder = decoders.ByteLevel()
    return backend


def _split_then_bytes(pattern: str) -> list[Any]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


def _sentencepiece_bpe(meta: dict[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    """SentencePiece BPE as merges: a pair merges when its concatenation is a piece, best score first."""
    vocab = {t: i for i, t in enumerate(tokens)}
    scores = meta.get("tokenizer.ggml.scores", [])
    merges = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[index], index, vocab[left], vocab[right], left, right))
    merges.sort()
    unknown = tokens[meta.get("tokenizer.ggml.unknown_token_id", 0)]
    pairs = [(m[4], m[5]) for m in merges]
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = meta.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return backend
