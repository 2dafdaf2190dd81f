"""One request's place in its grammar. Plain Python, so that the scheduler may hold it."""

from collections.abc import Sequence
from typing import Protocol

from vllm_clone.errors import RequestError
from vllm_clone.messages import EngineCoreRequest


class GrammarError(ValueError):
    """A grammar cannot be compiled or used; the message says what is wrong and where."""


class Matcher(Protocol):
    """A position in a compiled grammar."""

    @property
    def is_terminated(self) -> bool:
        """Whether a stop token has ended the text."""
        ...

    def accept(self, token_id: int) -> bool:
        """Move on by one token; False when the grammar does not allow it here."""
        ...

    def fill(self, words: memoryview) -> None:
        """Write which tokens may come next: bit v % 8 of byte v // 8 allows token v. Bytes; all are written."""
        ...


class Compiled(Protocol):
    """A grammar ready to be followed, by any number of requests."""

    @property
    def size_bytes(self) -> int: ...

    def matcher(self, stop_ids: Sequence[int]) -> Matcher:
        """A new position at the start; ``stop_ids`` may come where the grammar may end, and end it."""
        ...


class Compilation:
    """A grammar that is or will be compiled, shared by the requests that ask for the same one.

    Attributes:
        compiled: the result, or None while there is none.
        failure: why there will be none.
        begun: when the work on it began; None before.
    """

    __slots__ = ("begun", "compiled", "failure")

    def __init__(self) -> None:
        self.compiled: Compiled | None = None
        self.failure: RequestError | None = None
        self.begun: float | None = None

    @property
    def is_done(self) -> bool:
        return self.compiled is not None or self.failure is not None


class RequestGrammar:
    """What one request's output must follow.

    ``begins_after``: ids that end a chain of thought. The grammar holds for what comes after them; with None it
    holds from the first token. It is not compiled yet when the object is made: :meth:`start` comes first.
    """

    __slots__ = ("_begins_after", "_compilation", "_matcher", "_stop_ids", "_tail")

    def __init__(
        self, compilation: Compilation, stop_ids: Sequence[int], begins_after: Sequence[int] | None = None
    ) -> None:
        self._compilation = compilation
        self._stop_ids = stop_ids
        self._begins_after = list(begins_after or ())
        self._tail: list[int] = []
        self._matcher: Matcher | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether the compilation is over, well or not."""
        return self._compilation.is_done

    @property
    def failure(self) -> RequestError | None:
        """Why there is no grammar to follow."""
        return self._compilation.failure

    @property
    def is_active(self) -> bool:
        """Whether the next token must follow the grammar."""
        return not self._begins_after

    @property
    def is_terminated(self) -> bool:
        return self._matcher is not None and self._matcher.is_terminated

    def start(self) -> None:
        """Take a place at the grammar's beginning."""
        compiled = self._compilation.compiled
        assert compiled is not None
        self._matcher = compiled.matcher(self._stop_ids)

    def accept(self, token_id: int) -> bool:
        """Take in a sampled token; False when the grammar forbids it."""
        if self._begins_after:
            self._tail = [*self._tail, token_id][-len(self._begins_after) :]
            if self._tail == self._begins_after:
                self._begins_after = []
            return True
        assert self._matcher is not None
        return self._matcher.accept(token_id)

    def fill(self, words: memoryview) -> None:
        """See :meth:`Matcher.fill`."""
        assert self._matcher is not None
        self._matcher.fill(words)


class GrammarSource(Protocol):
    """Where the scheduler gets grammars from."""

    def begin(self, request: EngineCoreRequest) -> RequestGrammar:
        """The grammar of a request that has one; it is compiled aside. Never blocks."""
        ...

    def expire(self) -> None:
        """Give up compilations that take too long."""
        ...
