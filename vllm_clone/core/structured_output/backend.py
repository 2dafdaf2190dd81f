"""Which library compiles a grammar."""

from collections.abc import Callable
from typing import Protocol

from vllm_clone.config import StructuredOutputsConfig
from vllm_clone.core.structured_output.grammar import Compiled, GrammarError
from vllm_clone.core.structured_output.spec import GrammarSpec, beyond_xgrammar, has_xgrammar
from vllm_clone.core.structured_output.vocabulary import Vocabulary


class Backend(Protocol):
    """A library, set up for one vocabulary."""

    def compile(self, spec: GrammarSpec) -> Compiled:
        """Raises GrammarError."""
        ...


class Backends:
    """The libraries that the configuration allows, each loaded when it is first needed."""

    def __init__(self, config: StructuredOutputsConfig, load_vocabulary: Callable[[], Vocabulary]) -> None:
        self._choice = config.backend
        self._load_vocabulary = load_vocabulary
        self._vocabulary: Vocabulary | None = None
        self._loaded: dict[str, Backend] = {}

    def load(self, spec: GrammarSpec) -> None:
        """Get ready to compile. Takes seconds the first time; one thread at a time may call it."""
        for name in self._names(spec):
            self._get(name)

    def compile(self, spec: GrammarSpec) -> Compiled:
        """The grammar by the first library that can.

        Raises:
            GrammarError: none can.
        """
        failures: dict[str, GrammarError] = {}
        for name in self._names(spec):
            try:
                return self._loaded[name].compile(spec)
            except GrammarError as error:
                failures[name] = error
        # What guidance says of a mistake is the clearer.
        raise failures.get("guidance") or next(iter(failures.values()))

    def _names(self, spec: GrammarSpec) -> list[str]:
        if self._choice != "auto":
            return [self._choice]
        if not has_xgrammar() or beyond_xgrammar(spec) is not None or _is_lark(spec):
            return ["guidance"]
        # A mask of xgrammar's takes 3 ms for a regex with high counts, and 0.03 ms for most JSON; guidance's 0.2 ms.
        return ["guidance", "xgrammar"] if spec.kind == "regex" else ["xgrammar", "guidance"]

    def _get(self, name: str) -> Backend:
        if name not in self._loaded:
            if self._vocabulary is None:
                self._vocabulary = self._load_vocabulary()
            if name == "xgrammar":
                from vllm_clone.core.structured_output.xgrammar import XGrammarBackend

                self._loaded[name] = XGrammarBackend(self._vocabulary)
            else:
                from vllm_clone.core.structured_output.guidance import GuidanceBackend

                self._loaded[name] = GuidanceBackend(self._vocabulary)
        return self._loaded[name]


def _is_lark(spec: GrammarSpec) -> bool:
    return spec.kind == "grammar" and "::=" not in spec.text
