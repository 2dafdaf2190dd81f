"""Refuses structured outputs that no library will compile, before the engine sees them."""

import re
from functools import lru_cache

from vllm_clone.config import StructuredOutputsConfig
from vllm_clone.core.structured_output.spec import GrammarSpec, beyond_xgrammar, has_xgrammar, make_spec
from vllm_clone.errors import RequestError
from vllm_clone.sampling_params import StructuredOutputsParams

_NOT_BUILT = re.compile(r"nimplemented|not supported|not known|[Uu]nknown format")
"""How guidance says that a grammar is beyond it, rather than wrong."""
REMEMBERED = 64
"""Verdicts kept; most clients send one grammar many times."""


class GrammarChecker:
    """Thread-safe. Needs neither torch nor a tokenizer; what only xgrammar could tell is left to the engine."""

    def __init__(self, config: StructuredOutputsConfig) -> None:
        self._config = config
        self._verdict = lru_cache(maxsize=REMEMBERED)(self._judge)

    def check(self, params: StructuredOutputsParams) -> None:
        """Raises RequestError, which says what is wrong and where."""
        wrong = self._verdict(make_spec(params, self._config))
        if wrong is not None:
            raise RequestError(f"The grammar cannot be compiled: {wrong}")

    def _judge(self, spec: GrammarSpec) -> str | None:
        backend, lost = self._config.backend, beyond_xgrammar(spec)
        if backend == "xgrammar":
            return None if lost is None else f"{lost}: xgrammar does not hold the text to it; start with backend auto"
        from vllm_clone.core.structured_output.guidance import validate  # 65 ms that most servers never need

        try:
            wrong = validate(spec)
        except BaseException as error:
            if isinstance(error, Exception | KeyboardInterrupt | SystemExit):
                raise
            wrong = f"the compiler failed on it: {error}"  # a panic of the Rust library is no Exception
        if wrong is not None and backend == "auto" and lost is None and has_xgrammar() and _NOT_BUILT.search(wrong):
            return None  # the engine asks xgrammar
        return wrong
