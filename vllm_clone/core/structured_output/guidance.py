"""Grammars through llguidance. Importing this module imports neither torch nor numpy."""

import json
import re
from collections.abc import Sequence
from typing import Any

import llguidance

from vllm_clone.core.structured_output.grammar import GrammarError
from vllm_clone.core.structured_output.spec import GrammarSpec, schema_of
from vllm_clone.core.structured_output.tags import json_options, tag_grammar
from vllm_clone.core.structured_output.vocabulary import Vocabulary

_STATE = "<state>"
_IN_WRAPPER = re.compile(r"^at \d+\(\d+\): |\n +1 \| start: [\s\S]*$")
"""A place in the one rule that the library wraps around a regex, and the excerpt that shows it."""
_TYPICAL_BYTES = 200_000
"""What a compiled grammar takes, tables of its lexer included; the library does not tell."""


def to_grammar(spec: GrammarSpec, special: dict[bytes, int] | None = None) -> str:
    """A specification in llguidance's own form.

    Args:
        spec: what the text must follow.
        special: names of special tokens and their ids, which structural tags may begin or end with.

    Raises:
        GrammarError: it cannot be said in that form.
    """
    try:
        if spec.kind == "json":
            return json_grammar(schema_of(spec), spec)
        if spec.kind == "structural_tag":
            return tag_grammar(schema_of(spec), spec, special or {})
        return llguidance.grammar_from(spec.kind, spec.text)
    except GrammarError:
        raise
    except (ValueError, RecursionError) as error:
        raise GrammarError(_plain(str(error), spec)) from error


def json_grammar(schema: Any, spec: GrammarSpec) -> str:
    """A JSON schema in llguidance's own form, with the specification's whitespace."""
    options = json_options(spec)
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)  # type: ignore[arg-type]


def validate(spec: GrammarSpec) -> str | None:
    """What is wrong with a specification as far as it shows without a vocabulary; None when nothing is."""
    try:
        grammar = to_grammar(spec)
    except GrammarError as error:
        return str(error)
    return _plain(llguidance.LLMatcher.validate_grammar(grammar), spec) or None


class GuidanceBackend:
    """Compiles for one vocabulary. Takes a quarter of a second to make; may be used by any thread."""

    name = "guidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._special = {name: token for token, name in vocabulary.special_names.items()}
        stop_ids = list(vocabulary.stop_ids)
        size = len(vocabulary.token_bytes)
        wrapper = llguidance.TokenizerWrapper(_Tokens(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=size, eos_token=stop_ids)

    def compile(self, spec: GrammarSpec) -> "CompiledGuidance":
        """Raises GrammarError."""
        matcher = llguidance.LLMatcher(self._tokenizer, to_grammar(spec, self._special), log_level=0)
        if matcher.is_error():
            raise GrammarError(_plain(matcher.get_error(), spec))
        return CompiledGuidance(matcher, self._vocabulary, _TYPICAL_BYTES + 10 * len(spec.text))


class CompiledGuidance:
    """A matcher at its start, to be copied."""

    def __init__(self, start: llguidance.LLMatcher, vocabulary: Vocabulary, size_bytes: int) -> None:
        self._start = start
        self._vocabulary = vocabulary
        self.size_bytes = size_bytes

    def matcher(self, stop_ids: Sequence[int]) -> "GuidanceMatcher":
        """A copy at the start."""
        return GuidanceMatcher(self._start.deep_copy(), frozenset(self._vocabulary.ends(stop_ids)))


class GuidanceMatcher:
    """A position in a grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, stop_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._stop_ids = stop_ids
        self.is_terminated = False

    def accept(self, token_id: int) -> bool:
        if self.is_terminated:
            return True
        if token_id in self._stop_ids:
            self.is_terminated = self._matcher.is_accepting()
            return self.is_terminated
        return self._matcher.consume_token(token_id)

    def fill(self, words: memoryview) -> None:
        size = len(words)
        words[:] = self._matcher.compute_bitmask()[:size]
        if self._matcher.is_accepting():
            for token_id in self._stop_ids:
                words[token_id >> 3] |= 1 << (token_id & 7)


class _Tokens:
    """What llguidance asks of a tokenizer."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.stop_ids[0]
        self.bos_token_id = None
        names = vocabulary.special_names
        self.tokens = [names.get(i, text) for i, text in enumerate(vocabulary.token_bytes)]
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def _plain(message: str, spec: GrammarSpec) -> str:
    """A message of the library without its dump of internal state, and without places in a grammar of our own."""
    message = message.split(_STATE)[0].strip()
    return _IN_WRAPPER.sub("", message) if spec.kind == "regex" else message
