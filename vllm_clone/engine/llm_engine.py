"""LLMEngine: the engine for synchronous code, in the caller's process and thread."""

import time
from collections.abc import Callable
from typing import Any

from vllm_clone.config import VllmConfig
from vllm_clone.core.engine_core import EngineCore
from vllm_clone.engine.input_processor import InputProcessor
from vllm_clone.engine.inputs import PromptType
from vllm_clone.engine.output_processor import OutputProcessor
from vllm_clone.messages import EngineCoreOutput
from vllm_clone.metrics.stats import IterationStats
from vllm_clone.outputs import CompletionOutput, RequestOutput
from vllm_clone.sampling_params import SamplingParams
from vllm_clone.tokenizers import Tokenizer, get_tokenizer


class LLMEngine:
    """Add requests, call :meth:`step` until nothing is unfinished. Not thread-safe.

    Raises:
        ConfigError, ModelLoadError: the engine cannot start.
    """

    def __init__(self, config: VllmConfig, executor_factory: Callable[[VllmConfig], Any] | None = None) -> None:
        model = config.model_config
        self.vllm_config = config
        self.tokenizer: Tokenizer | None = None
        if not model.skip_tokenizer_init:
            self.tokenizer = get_tokenizer(model.tokenizer_path, model.tokenizer_mode, model.trust_remote_code)
        if executor_factory is None:
            from vllm_clone.executor import get_executor_class

            executor_factory = get_executor_class(config)
        self.input_processor = InputProcessor(config, self.tokenizer)
        self.output_processor = OutputProcessor(self.tokenizer, config.scheduler_config.stream_interval)
        self.core = EngineCore(config, executor_factory)
        self._ready_outputs: list[RequestOutput] = []

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request.

        Raises:
            RequestError: it cannot be served.
        """
        request = self.input_processor.process(request_id, prompt, params, priority=priority, cache_salt=cache_salt)

        def sink(item: RequestOutput | Exception) -> None:
            if isinstance(item, Exception):
                failed = CompletionOutput(0, "", [], finish_reason="error", stop_reason=str(item))
                item = RequestOutput(request_id, request.prompt, request.prompt_token_ids, [failed], True)
            self._ready_outputs.append(item)

        self.output_processor.add(request, sink)
        for sequence in request.sequences:
            failure = self.core.add_request(sequence)
            if failure is not None:
                self._process([failure], time.monotonic())

    def abort_request(self, request_ids: list[str]) -> None:
        """End requests; the next :meth:`step` returns their last outputs, finish reason ``abort``."""
        for request_id in request_ids:
            self.core.abort_requests(self.output_processor.abort(request_id))

    @property
    def has_unfinished_requests(self) -> bool:
        return self.output_processor.num_requests > 0 or bool(self._ready_outputs)

    def step(self) -> list[RequestOutput]:
        """One engine step; what it brought, by output kind. A failed request has finish reason ``error`` and the
        cause as its stop reason."""
        if not self._ready_outputs:
            self.core.wait_for_grammars()
        if self.core.has_work:
            for batch in self.core.step().values():
                self._process(batch.outputs, batch.timestamp)
        ready, self._ready_outputs = self._ready_outputs, []
        return ready

    def reset_prefix_cache(self) -> bool:
        return self.core.reset_prefix_cache()

    def shutdown(self) -> None:
        """Release the model; later steps fail."""
        self.core.shutdown()

    def _process(self, outputs: list[EngineCoreOutput], timestamp: float) -> None:
        self.core.abort_requests(self.output_processor.process(outputs, timestamp, IterationStats()))
