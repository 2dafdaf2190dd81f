"""An engine that prepares requests and never runs one."""

from typing import Any

from tests.entrypoints.http_server import http_config, tokenizer
from vllm_clone.engine.input_processor import InputProcessor
from vllm_clone.engine.inputs import ProcessedRequest, TokensPrompt
from vllm_clone.sampling_params import SamplingParams


class Preparer:
    """As much of AsyncLLM as turns a body into what goes to the engine."""

    def __init__(self) -> None:
        self.tokenizer = tokenizer()
        self.input_processor = InputProcessor(http_config(), self.tokenizer)

    async def prepare(
        self, prompt: TokensPrompt, params: SamplingParams, request_id: str, **more: Any
    ) -> ProcessedRequest:
        return self.input_processor.process(request_id, prompt, params, **more)
