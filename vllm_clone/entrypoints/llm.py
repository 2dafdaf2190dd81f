"""LLM: offline generation from Python, the engine in the caller's process."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from vllm_clone.chat import ChatRenderer, ContentFormat, load_template
from vllm_clone.engine.inputs import PromptType, TokensPrompt
from vllm_clone.engine.llm_engine import LLMEngine
from vllm_clone.errors import RequestError
from vllm_clone.outputs import RequestOutput
from vllm_clone.sampling_params import RequestOutputKind, SamplingParams
from vllm_clone.tokenizers import Tokenizer

Prompt = str | TokensPrompt | Mapping[str, Any] | Sequence[int]
"""A text, token ids, or a mapping with ``prompt`` or ``prompt_token_ids``."""
Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model loaded once and asked many times.

    Args:
        model: a hub id, a local directory, or a .gguf file.
        kwargs: any engine flag by its Python name (``max_model_len=2048``, ``dtype="float32"`` …).

    Raises:
        ConfigError: a value cannot work. ModelLoadError: the weights cannot be read.
    """

    def __init__(self, model: str, **kwargs: Any) -> None:
        from vllm_clone.engine.arg_utils import EngineArgs

        self.llm_engine = LLMEngine(EngineArgs(model=model, **kwargs).create_engine_config("offline"))
        self._request_ids = itertools.count()

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ValueError when it was not loaded."""
        tokenizer = self.llm_engine.tokenizer
        if tokenizer is None:
            raise ValueError("there is no tokenizer: the model was loaded with skip_tokenizer_init=True")
        return tokenizer

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a method of the worker by name, such as one of ``worker_extension_cls``; a list of one answer."""
        return self.llm_engine.core.collective_rpc(method, args, kwargs)

    def start_profile(self) -> None:
        """Begin a trace of steps; needs ``profiler_config``."""
        self.llm_engine.core.profile(True)

    def stop_profile(self) -> None:
        """End the trace and write it."""
        self.llm_engine.core.profile(False)

    def get_default_sampling_params(self) -> SamplingParams:
        """What a call without sampling parameters uses: the model's generation defaults."""
        return self.llm_engine.input_processor.default_params()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; one output per prompt, in their order.

        Args:
            prompts: one prompt or many.
            sampling_params: one for all, one each, or None for the model's defaults.
            use_tqdm: show a progress bar with tokens per second.
            priority: one each; smaller is served sooner under the priority policy.

        Raises:
            RequestError: a prompt or its parameters are invalid; then nothing is generated.
        """
        return self._run([_as_prompt(p) for p in _as_list(prompts)], sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        chat_template_content_format: ContentFormat = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or many (a list of those); see :meth:`generate`."""
        tokenizer = self.get_tokenizer()
        renderer = ChatRenderer(tokenizer, load_template(chat_template), chat_template_content_format)
        many = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts: list[PromptType] = []
        for conversation in many:
            text = renderer.render(
                [dict(message) for message in conversation],  # type: ignore[arg-type]
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            ids = self.llm_engine.input_processor.encode(text, add_special_tokens=False)
            prompts.append(TokensPrompt(ids, text))
        return self._run(prompts, sampling_params, use_tqdm, None)

    def reset_prefix_cache(self) -> bool:
        """Forget cached prompt prefixes."""
        return self.llm_engine.reset_prefix_cache()

    def _run(
        self,
        prompts: list[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        engine = self.llm_engine
        params = _one_each(sampling_params or self.get_default_sampling_params(), len(prompts))
        priorities = list(priority) if priority is not None else [0] * len(prompts)
        if len(priorities) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts need as many priorities, got {len(priorities)}")
        ids = [str(next(self._request_ids)) for _ in prompts]
        try:
            for request_id, prompt, one, rank in zip(ids, prompts, params, priorities, strict=True):
                one = one.clone()
                one.output_kind = RequestOutputKind.FINAL_ONLY
                engine.add_request(request_id, prompt, one, priority=rank)
            return self._collect(ids, use_tqdm)
        except BaseException:
            engine.abort_request(ids)
            while engine.has_unfinished_requests:
                engine.step()
            raise

    def _collect(self, ids: list[str], use_tqdm: bool) -> list[RequestOutput]:
        engine, outputs = self.llm_engine, dict[str, RequestOutput]()
        read = written = 0
        with tqdm(total=len(ids), desc="Processed prompts", dynamic_ncols=True, disable=not use_tqdm) as bar:
            while len(outputs) < len(ids):
                for output in engine.step():
                    outputs[output.request_id] = output
                    read += len(output.prompt_token_ids)
                    written += sum(len(c.token_ids) for c in output.outputs)
                    elapsed = bar.format_dict["elapsed"] or 1e-9
                    bar.set_postfix_str(
                        f"input {read / elapsed:.2f} tok/s, output {written / elapsed:.2f} tok/s", False
                    )
                    bar.update()
        return [outputs[i] for i in ids]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    if isinstance(prompts, str | TokensPrompt | Mapping):
        return [prompts]
    if prompts and all(isinstance(p, int) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _as_prompt(prompt: Prompt) -> PromptType:
    if isinstance(prompt, str | TokensPrompt):
        return prompt
    if isinstance(prompt, Mapping):
        ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
        if ids is not None:
            return TokensPrompt(list(ids), text)
        if isinstance(text, str):
            return text
        raise RequestError("A prompt mapping needs prompt or prompt_token_ids.", param="prompt")
    return TokensPrompt(list(prompt))


def _one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    many = [params] * count if isinstance(params, SamplingParams) else list(params)
    if len(many) != count:
        raise ValueError(f"{count} prompts need one sampling_params or {count}, got {len(many)}")
    return many
