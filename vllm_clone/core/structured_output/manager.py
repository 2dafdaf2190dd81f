"""Compiles grammars aside from the engine's loop, keeps them, and fills the masks of a step."""

import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping

from vllm_clone import envs
from vllm_clone.config import VllmConfig
from vllm_clone.core.request import Request
from vllm_clone.core.structured_output.backend import Backends
from vllm_clone.core.structured_output.grammar import Compilation, Compiled, GrammarError, RequestGrammar
from vllm_clone.core.structured_output.spec import GrammarSpec, make_spec
from vllm_clone.core.structured_output.vocabulary import Vocabulary, load_vocabulary
from vllm_clone.errors import RequestError
from vllm_clone.logger import init_logger
from vllm_clone.messages import EngineCoreRequest
from vllm_clone.step import GrammarMasks, SchedulerOutput

logger = init_logger(__name__)

MAX_GRAMMARS = 4096
"""Most grammars kept, however small."""


class GrammarManager:
    """One per engine. Costs nothing until a request wants a grammar.

    The loop's thread calls every method; compilations run in threads of their own, at most one for two cores. One
    that takes too long is given up: its request ends, and its thread, which cannot be stopped, no longer counts.
    """

    def __init__(
        self,
        config: VllmConfig,
        *,
        load: Callable[[VllmConfig], Vocabulary] = load_vocabulary,
        clock: Callable[[], float] = time.monotonic,
        num_threads: int | None = None,
    ) -> None:
        self.on_compiled: Callable[[], None] = lambda: None
        """Called by a compiling thread when it is done."""
        self._config = config.structured_outputs_config
        self._enable_in_reasoning = self._config.enable_in_reasoning
        self._backends = Backends(self._config, lambda: load(config))
        self._row_bytes = (config.model_config.vocab_size + 31) // 32 * 4
        self._clock = clock
        self._num_threads = num_threads or max(1, (os.cpu_count() or 1) // 2)
        self._max_seconds = envs.VLLM_REGEX_COMPILATION_TIMEOUT_S
        self._max_bytes = envs.VLLM_XGRAMMAR_CACHE_MB << 20
        self._changed = threading.Condition(threading.RLock())
        # What follows is guarded by the condition's lock.
        self._kept: OrderedDict[GrammarSpec, Compilation] = OrderedDict()
        self._kept_bytes = 0
        self._queue: deque[tuple[GrammarSpec, Compilation]] = deque()
        self._working: set[Compilation] = set()
        self._loading = threading.Lock()
        self._closed = False

    # ---- compiling ----

    def begin(self, request: EngineCoreRequest) -> RequestGrammar:
        """The grammar of a request that has one. Returns at once; it is compiled later, unless it was before.

        Raises:
            RequestError: there is no such grammar; the frontend refuses these before.
        """
        params = request.sampling_params
        assert params.structured_outputs is not None
        spec = make_spec(params.structured_outputs, self._config)
        begins_after = None if self._enable_in_reasoning else request.grammar_begins_after
        return RequestGrammar(self._compilation(spec), params.stop_set, begins_after)

    def expire(self) -> None:
        """Give up compilations that have taken longer than VLLM_REGEX_COMPILATION_TIMEOUT_S (0: none does)."""
        if not self._max_seconds:
            return
        with self._changed:
            now = self._clock()
            for job in [j for j in self._working if j.begun is not None and now - j.begun >= self._max_seconds]:
                job.failure = RequestError(
                    f"The grammar takes longer than {self._max_seconds:g} s to compile "
                    "(VLLM_REGEX_COMPILATION_TIMEOUT_S); make it simpler."
                )
                self._working.discard(job)
            self._start_threads()

    @property
    def seconds_to_expiry(self) -> float | None:
        """When :meth:`expire` may have something to do, at the earliest; None when it has not."""
        if not self._max_seconds:
            return None
        with self._changed:
            begun = [job.begun for job in self._working if job.begun is not None]
        # One that still loads its library, or waits for a thread, has at least the whole time left.
        return max(min(begun, default=self._clock()) + self._max_seconds - self._clock(), 0.0)

    def wait(self, until: Callable[[], bool]) -> None:
        """Return when ``until`` holds, which is asked after each compilation; some are given up meanwhile."""
        while not until():
            with self._changed:
                self._changed.wait_for(until, self.seconds_to_expiry)
            self.expire()

    def close(self) -> None:
        """Begin no more compilations."""
        with self._changed:
            self._closed = True
            self._queue.clear()

    # ---- masks ----

    def masks(self, work: SchedulerOutput, requests: Mapping[str, Request]) -> GrammarMasks | None:
        """What the grammars allow the requests among ``requests`` that sample in this step; None when none does."""
        active: list[tuple[str, RequestGrammar]] = []
        for request_id, request in requests.items():
            grammar = request.grammar
            if grammar is None or not grammar.is_active or request_id not in work.num_scheduled_tokens:
                continue
            if request.num_computed_tokens == request.num_tokens:  # as the scheduler has advanced it
                active.append((request_id, grammar))
        if not active:
            return None
        size = self._row_bytes
        words = bytearray(size * len(active))
        with memoryview(words) as view:
            for i, (_, grammar) in enumerate(active):
                grammar.fill(view[i * size : (i + 1) * size])
        return GrammarMasks([request_id for request_id, _ in active], words)

    # ---- parts ----

    def _compilation(self, spec: GrammarSpec) -> Compilation:
        with self._changed:
            job = self._kept.get(spec)
            if job is not None:
                self._kept.move_to_end(spec)
                return job
            job = self._kept[spec] = Compilation()
            self._queue.append((spec, job))
            self._start_threads()
            return job

    def _start_threads(self) -> None:
        while self._queue and len(self._working) < self._num_threads and not self._closed:
            spec, job = self._queue.popleft()
            self._working.add(job)
            threading.Thread(target=self._compile, args=(spec, job), name="grammar", daemon=True).start()

    def _compile(self, spec: GrammarSpec, job: Compilation) -> None:
        compiled: Compiled | None = None
        failure: RequestError | None = None
        try:
            with self._loading:
                self._backends.load(spec)
            job.begun = self._clock()
            compiled = self._backends.compile(spec)
        except GrammarError as error:
            failure = RequestError(f"The grammar cannot be compiled: {error}")
        except BaseException as error:  # a panic of the Rust library is no Exception, and its request must end
            logger.exception("A grammar could not be compiled")
            message = f"Structured outputs do not work here: {type(error).__name__}: {error}"
            failure = RequestError(message, kind="internal")
        with self._changed:
            # One that was given up meanwhile serves the next request that asks for it.
            job.compiled, job.failure = compiled, failure
            self._working.discard(job)
            self._evict(compiled.size_bytes if compiled is not None else 0)
            self._start_threads()
            self._changed.notify_all()
        self.on_compiled()

    def _evict(self, added: int) -> None:
        """Make room: forget those not used for longest. Requests that follow them keep them."""
        self._kept_bytes += added
        for spec, job in list(self._kept.items()):
            if self._kept_bytes <= self._max_bytes and len(self._kept) <= MAX_GRAMMARS:
                return
            if job.is_done:
                del self._kept[spec]
                self._kept_bytes -= job.compiled.size_bytes if job.compiled is not None else 0
