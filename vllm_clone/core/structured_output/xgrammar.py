"""Grammars through xgrammar, an extra package. Importing this module takes seconds: it brings transformers along."""

import json
import re
import threading
from collections.abc import Sequence

import numpy as np
import xgrammar

from vllm_clone.core.structured_output.grammar import GrammarError
from vllm_clone.core.structured_output.spec import MAX_BLANKS, GrammarSpec, beyond_xgrammar, schema_of
from vllm_clone.core.structured_output.vocabulary import Vocabulary

_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
"""Control characters but the line's ends, which the library keeps out of strings."""
_PLACE_IN_SOURCE = re.compile(r"^\[\d+:\d+:\d+\] \S+\.(cc|h):\d+: ")


class XGrammarBackend:
    """Compiles for one vocabulary. May be used by any thread."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._compilers: dict[str, xgrammar.GrammarCompiler] = {}
        self._lock = threading.Lock()

    def compile(self, spec: GrammarSpec) -> "CompiledXGrammar":
        """Raises GrammarError, also for what the library would take but not hold the text to."""
        lost = beyond_xgrammar(spec)
        if lost is not None:
            raise GrammarError(f"{lost}: xgrammar does not hold the text to it; the guidance backend may")
        try:
            return CompiledXGrammar(self._compile(spec), self._vocabulary)
        except (RuntimeError, ValueError, TypeError) as error:
            raise GrammarError(_PLACE_IN_SOURCE.sub("", str(error)).strip()) from error

    def _compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        compiler = self._compiler(spec)
        if spec.kind == "json":
            separators = None if spec.any_whitespace else (",", ":")
            return compiler.compile_json_schema(
                json.dumps(schema_of(spec), ensure_ascii=False),
                any_whitespace=spec.any_whitespace,
                separators=separators,
                strict_mode=spec.closed_objects,
                max_whitespace_cnt=MAX_BLANKS,
            )
        if spec.kind == "regex":
            return compiler.compile_regex(spec.text)
        if spec.kind == "choice":
            texts = json.loads(spec.text)
            return compiler.compile_grammar("root ::= " + " | ".join(map(_quoted, texts)))
        if spec.kind == "grammar":
            return compiler.compile_grammar(spec.text) if "::=" in spec.text else compiler.compile_lark(spec.text)
        tag = json.loads(spec.text)
        if "structures" in tag:
            items = [
                {"type": "tag", "begin": s["begin"], "content": {"type": "json_schema", "json_schema": s["schema"]},
                 "end": s["end"]}
                for s in _structures(tag)
            ]  # fmt: skip
            form = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": items}
            tag = {"type": "structural_tag", "format": form}
        return compiler.compile_structural_tag(json.dumps({"type": "structural_tag", **tag}))

    def _compiler(self, spec: GrammarSpec) -> xgrammar.GrammarCompiler:
        """The compiler for the tokens that a kind of grammar may use."""
        kind = spec.kind if spec.kind in ("json", "structural_tag") else "text"
        with self._lock:
            if kind not in self._compilers:
                self._compilers[kind] = self._make_compiler(self._tokens(kind))
            return self._compilers[kind]

    def _tokens(self, kind: str) -> list[bytes]:
        words = self._vocabulary
        if kind == "structural_tag":  # whose marks may be special tokens: these count as the text of their name
            return [words.special_names.get(i, text) for i, text in enumerate(words.token_bytes)]
        if kind == "json":  # the library lets control characters into strings that have a length limit
            return [b"" if _CONTROL.search(text) else text for text in words.token_bytes]
        return words.token_bytes

    def _make_compiler(self, token_bytes: list[bytes]) -> xgrammar.GrammarCompiler:
        info = xgrammar.TokenizerInfo(
            token_bytes,
            xgrammar.VocabType.RAW,
            vocab_size=len(token_bytes),
            stop_token_ids=list(self._vocabulary.stop_ids),
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)  # the manager has a cache


class CompiledXGrammar:
    """A compiled grammar of the library."""

    def __init__(self, grammar: xgrammar.CompiledGrammar, vocabulary: Vocabulary) -> None:
        self._grammar = grammar
        self._vocabulary = vocabulary
        self.size_bytes = int(grammar.memory_size_bytes)

    def matcher(self, stop_ids: Sequence[int]) -> "XGrammarMatcher":
        """A matcher at the start."""
        ends = self._vocabulary.ends(stop_ids)
        return XGrammarMatcher(
            xgrammar.GrammarMatcher(self._grammar, override_stop_tokens=ends), self._vocabulary.num_words
        )


class XGrammarMatcher:
    """A position in a grammar."""

    def __init__(self, matcher: xgrammar.GrammarMatcher, num_words: int) -> None:
        self._matcher = matcher
        self._row_1W = np.zeros((1, num_words), np.int32)

    @property
    def is_terminated(self) -> bool:
        return self._matcher.is_terminated()

    def accept(self, token_id: int) -> bool:
        return self._matcher.is_terminated() or self._matcher.accept_token(token_id)

    def fill(self, words: memoryview) -> None:
        if self._matcher.is_terminated():
            words[:] = b"\xff" * len(words)
            return
        self._matcher.fill_next_token_bitmask(self._row_1W)
        words[:] = self._row_1W.view(np.uint8).data.cast("B")


def _structures(tag: dict[str, object]) -> list[dict[str, object]]:
    found = tag["structures"]
    if not isinstance(found, list) or not all(
        isinstance(s, dict) and {"begin", "schema", "end"} <= s.keys() for s in found
    ):
        raise GrammarError("structures must be a list of objects with begin, schema and end")
    return found


def _quoted(text: str) -> str:
    """A text as a literal of an EBNF grammar."""
    return json.dumps(text, ensure_ascii=False)
