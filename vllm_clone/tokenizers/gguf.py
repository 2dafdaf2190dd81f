"""Tokenizers rebuilt from GGUF metadata, equal to the one that the file was converted from."""

from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from vllm_clone.errors import ConfigError
from vllm_clone.hub.gguf import GGUFFile
from vllm_clone.tokenizers.fast import FastTokenizer, frame

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, str | None] = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "tekken": _TEKKEN_SPLIT,
}
"""Way of cutting text into words → its pattern; None for GPT-2's, which the library has built in."""
SAME_SPLIT = {
    "default": "gpt-2",
    "gpt2": "gpt-2",
    "starcoder": "smollm",
    "refact": "smollm",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "smaug-bpe": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "stablelm2": "qwen2",
}
"""Other values of tokenizer.ggml.pre that cut in the same way."""
WHOLE_WORDS = frozenset({"llama-bpe", "tekken"})
"""Their tokenizers take a word that is in the vocabulary as it is, before any merge."""


def from_gguf(path: Path) -> FastTokenizer:
    """The tokenizer that a GGUF file carries.

    Raises:
        ConfigError: no tokenizer, a damaged one, or a kind we cannot rebuild exactly.
    """
    meta = GGUFFile(path).metadata
    kind = meta.get("tokenizer.ggml.model")
    tokens: list[str] = meta.get("tokenizer.ggml.tokens", [])
    if not tokens:
        raise ConfigError(f"{path} holds no tokenizer; give --tokenizer a Hugging Face directory.")
    types = meta.get("tokenizer.ggml.token_type", [])
    control = {_CONTROL}
    if kind == "gpt2":
        backend, add_bos = _byte_level_bpe(path, meta, tokens)
    elif kind == "llama":
        backend, add_bos = _sentencepiece_bpe(path, meta, tokens), True
        control.add(_UNKNOWN)
    else:
        raise ConfigError(
            f"{path}: GGUF tokenizer {kind!r} is not supported; give --tokenizer a Hugging Face directory."
        )
    special = {}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = meta.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and token_id < len(tokens):
            special[f"{role}_token"] = tokens[token_id]
    # Only these two: files name ordinary tokens as padding or unknown.
    named = {special[role] for role in ("bos_token", "eos_token") if role in special}
    pairs = list(zip(tokens, types, strict=False))
    backend.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in pairs if k in control or t in named]
    )
    backend.add_tokens([AddedToken(t, normalized=False) for t, k in pairs if k == _USER_DEFINED and t not in named])
    frame(
        backend,
        special.get("bos_token") if meta.get("tokenizer.ggml.add_bos_token", add_bos) else None,
        special.get("eos_token") if meta.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    template = _chat_template(meta)
    settings = {"tokenizer_class": f"GGUF {kind}", **special, "chat_template": template}
    return FastTokenizer(backend, path.stem, special, template, settings)


def _chat_template(meta: dict[str, Any]) -> str | dict[str, str] | None:
    key = "tokenizer.chat_template"
    named = {k.removeprefix(key + "."): v for k, v in meta.items() if k.startswith(key + ".")}
    if named and key in meta:
        return {"default": meta[key], **named}
    return meta.get(key)


def _byte_level_bpe(path: Path, meta: dict[str, Any], tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """The tokenizer, and whether its kind begins texts with BOS unless the file says otherwise."""
    name = str(meta.get("tokenizer.ggml.pre", "default"))
    pre = SAME_SPLIT.get(name, name)
    if pre not in SPLITS:
        known = ", ".join(sorted([*SPLITS, *SAME_SPLIT]))
        raise ConfigError(
            f"{path}: GGUF pre-tokenizer {name!r} is not known ({known}); give --tokenizer a Hugging Face directory."
        )
    merges = [tuple(m.split(" ", 1)) for m in meta.get("tokenizer.ggml.merges", [])]
    vocab = {t: i for i, t in enumerate(tokens)}
    try:
        model = models.BPE(vocab, merges, ignore_merges=pre in WHOLE_WORDS)
    except Exception as error:  # the library raises a bare Exception
        raise ConfigError(f"{path}: the tokenizer's merges do not fit its vocabulary: {error}") from error
    backend = tokenizers.Tokenizer(model)
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _word_splitter(pre)
    backend.decoder = decoders.ByteLevel()
    return backend, pre == "llama-bpe"


def _word_splitter(pre: str) -> pre_tokenizers.PreTokenizer:
    pattern = SPLITS[pre]
    if pattern is not None:
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), bytes_only])
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return words


def _sentencepiece_bpe(path: Path, meta: dict[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    """SentencePiece BPE as merges: a pair merges when its concatenation is a piece, best score first."""
    vocab = {t: i for i, t in enumerate(tokens)}
    scores = meta.get("tokenizer.ggml.scores", [])
    unknown = meta.get("tokenizer.ggml.unknown_token_id", 0)
    if len(scores) != len(tokens) or unknown >= len(tokens):
        raise ConfigError(f"{path}: the tokenizer has {len(tokens)} tokens, {len(scores)} scores, and UNK {unknown}.")
    merges = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[index], index, vocab[left], vocab[right], left, right))
    merges.sort()
    pairs = [(m[4], m[5]) for m in merges]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab, pairs, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    prefix = meta.get("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return backend
