"""From a prompt and sampling parameters to engine requests: every check that needs the model or its tokenizer."""

import random
import secrets
import time
from collections.abc import Callable, Iterable

from vllm_clone import envs
from vllm_clone.config import VllmConfig
from vllm_clone.config.named_code import import_named
from vllm_clone.engine.grammar_check import GrammarChecker
from vllm_clone.engine.inputs import ProcessedRequest, PromptType, TokensPrompt
from vllm_clone.errors import RequestError
from vllm_clone.messages import EngineCoreRequest
from vllm_clone.sampling_params import SamplingParams
from vllm_clone.tokenizers.base import Tokenizer

LOGIT_BIAS_LIMIT = 100.0

MAX_REQUEST_IDS = 4_000_000
"""Token ids that all sequences of one request may carry to the engine together."""


class InputProcessor:
    """Validates requests against one model. Thread-safe except for the order in which seeds are drawn.

    Attributes:
        max_model_len: longest prompt plus output, in tokens.
        vocab_size: ids at or above it have no embedding.
    """

    def __init__(self, config: VllmConfig, tokenizer: Tokenizer | None, client_index: int = 0) -> None:
        """``client_index``: which of the engine's clients draws the seeds, so that no two draw the same."""
        model = self._model = config.model_config
        self.vocab_size = model.vocab_size
        self._max_logprobs = model.max_logprobs
        self._tokenizer = tokenizer
        self._eos_token_id = tokenizer.eos_token_id if tokenizer is not None else None
        self._other_eos_ids = [i for i in model.eos_token_ids if i != self._eos_token_id]
        self._defaults = model.generation_defaults
        named = model.logits_processors or []
        checks = [getattr(import_named("--logits-processors", name), "validate_params", None) for name in named]
        self._checks: list[Callable[[SamplingParams], None]] = [check for check in checks if check is not None]
        self._grammars = GrammarChecker(config.structured_outputs_config)
        self._seeds = random.Random(f"{model.seed}/{client_index}" if client_index else model.seed)

    @property
    def max_model_len(self) -> int:
        """Read each time: an engine told to fit its memory settles it only when it is ready."""
        length = self._model.max_model_len
        assert isinstance(length, int)
        return length

    def default_params(self) -> SamplingParams:
        """Parameters of a request that gives none: the model's generation defaults over the library's."""
        fields = SamplingParams.__struct_fields__
        return SamplingParams(**{k: v for k, v in self._defaults.items() if k in fields and v is not None})

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        grammar_begins_after: list[int] | None = None,
    ) -> ProcessedRequest:
        """Validate, tokenize and resolve one request; ``params`` stay as they are.

        ``grammar_begins_after``: ids that end a chain of thought, to which structured outputs do not apply; None
        when the answer begins at once.

        Raises:
            RequestError: the request cannot be served.
        """
        params.verify()
        self.check_grammar(params)
        text, ids = self._prompt(prompt, params)
        self._check_prompt(ids)
        params = self._resolve(params, len(ids))
        _check_size(params, len(ids))
        request = ProcessedRequest(request_id, text, ids, params, arrival_time or time.time())
        for index in range(params.n):
            request.sequences.append(
                EngineCoreRequest(
                    request_id=f"{request_id}-{index}-{secrets.token_hex(4)}",
                    prompt_token_ids=ids,
                    sampling_params=self._for_sequence(params, index),
                    arrival_time=request.arrival_time,
                    priority=priority,
                    cache_salt=cache_salt,
                    grammar_begins_after=grammar_begins_after,
                )
            )
        return request

    def check_grammar(self, params: SamplingParams) -> None:
        """Refuse structured outputs that cannot be compiled. Slow for a grammar that is new and large.

        Raises:
            RequestError: says what is wrong and where.
        """
        if params.structured_outputs is None:
            return
        if self._tokenizer is None:
            raise RequestError("Structured outputs need a tokenizer; this server has none (--skip-tokenizer-init).")
        self._grammars.check(params.structured_outputs)

    # ---- the prompt ----

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt text.

        Raises:
            RequestError: no tokenizer, or a text that must exceed the context.
        """
        if self._tokenizer is None:
            raise RequestError(
                "This server has no tokenizer (--skip-tokenizer-init); give the prompt as token ids.", param="prompt"
            )
        limit = self.max_model_len * self._tokenizer.max_chars_per_token
        if len(text) > limit:
            raise RequestError(
                f"The prompt has {len(text)} characters; this model's context of {self.max_model_len} tokens "
                f"holds at most {limit}. Shorten the prompt.",
                param="input_text",
                value=len(text),
            )
        return self._tokenizer.encode(text, add_special_tokens)

    def _prompt(self, prompt: PromptType, params: SamplingParams) -> tuple[str | None, list[int]]:
        keep = params.truncate_prompt_tokens
        if keep is not None:
            if keep < -1:
                raise RequestError(
                    f"truncate_prompt_tokens must be at least -1, got {keep}.",
                    param="truncate_prompt_tokens",
                    value=keep,
                )
            if keep > self.max_model_len:
                raise RequestError(
                    f"truncate_prompt_tokens must be at most max_model_len ({self.max_model_len}), got {keep}.",
                    param="truncate_prompt_tokens",
                    value=keep,
                )
        if isinstance(prompt, TokensPrompt):
            text, ids = prompt.prompt, prompt.prompt_token_ids
        elif keep is not None and self._tokenizer is not None:
            text, ids = prompt, self._tokenizer.encode(prompt)
        else:
            text, ids = prompt, self.encode(prompt)
        if keep is not None:
            count = self.max_model_len - 1 if keep == -1 else keep
            ids = ids[max(len(ids) - count, 0) :]
        return text, ids

    def _check_prompt(self, ids: list[int]) -> None:
        longest = self.max_model_len
        if not ids:
            raise RequestError("The prompt is empty; it needs at least one token.")
        if len(ids) > longest:
            raise RequestError(
                f"This model's context holds {longest} tokens and the prompt has at least {longest + 1}. "
                "Shorten the prompt.",
                param="input_tokens",
                value=longest + 1,
            )
        if len(ids) == longest:
            raise RequestError(
                f"max_tokens must be at least 1, got 0: the prompt fills the whole context of {longest} tokens.",
                param="max_tokens",
                value=0,
            )
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise RequestError(f"Token id {bad} is outside the vocabulary (0 to {self.vocab_size - 1}).", value=bad)

    # ---- parameters ----

    def _resolve(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        """A copy with everything filled in that the engine needs."""
        params = params.clone()
        self._check_limits(params)
        for check in self._checks:
            try:
                check(params)
            except ValueError as error:
                raise RequestError(str(error)) from error
        room = self.max_model_len - prompt_len
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > params.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({params.max_tokens}), got {params.min_tokens}.",
                value=params.min_tokens,
            )
        params.eos_token_id = self._eos_token_id
        eos_ids = [] if self._eos_token_id is None else [self._eos_token_id]
        given = params.stop_token_ids
        if not params.ignore_eos:
            params.stop_token_ids = list(dict.fromkeys([*given, *self._other_eos_ids]))
        params.stop_set = list(dict.fromkeys([*eos_ids, *self._other_eos_ids, *given]))
        if params.bad_words:
            params.bad_words_token_ids = self._tokenize_bad_words(params.bad_words)
        _check_something_is_left(params)
        return params

    def _check_limits(self, params: SamplingParams) -> None:
        if params.max_tokens is not None and params.max_tokens > self.max_model_len:
            raise RequestError(
                f"max_tokens must be at most the context length ({self.max_model_len}), got {params.max_tokens}.",
                param="max_tokens",
                value=params.max_tokens,
            )
        limit = self.vocab_size if self._max_logprobs == -1 else self._max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name)
            count = self.vocab_size if asked == -1 else asked
            if count is not None and count > limit:
                whole = f" (the whole vocabulary: {count})" if asked == -1 else ""
                raise RequestError(f"{name} must be at most {limit}, got {asked}{whole}.", param=name, value=asked)
        if (params.stop or params.bad_words) and self._tokenizer is None:
            raise RequestError("Stop strings and bad words need a tokenizer; this server has none.")
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._check_ids("logprob_token_ids", params.logprob_token_ids or ())
        if params.logit_bias:
            self._check_ids("logit_bias", params.logit_bias)
            nans = [i for i, value in params.logit_bias.items() if value != value]
            if nans:
                raise RequestError(
                    f"logit_bias values must be numbers; those of the ids {nans[:16]} are NaN.", param="logit_bias"
                )
            params.logit_bias = {
                i: min(max(v, -LOGIT_BIAS_LIMIT), LOGIT_BIAS_LIMIT) for i, v in params.logit_bias.items()
            }

    def _check_ids(self, name: str, ids: Iterable[int]) -> None:
        bad = [i for i in ids if not 0 <= i < self.vocab_size]
        if bad:
            raise RequestError(
                f"{name} must be within the vocabulary (0 to {self.vocab_size - 1}), got {bad[:16]}.",
                param=name,
                value=bad[:16],
            )

    def _tokenize_bad_words(self, words: list[str]) -> list[list[int]]:
        """Each word as it starts a text and, where that is another token sequence of equal length, after a space."""
        assert self._tokenizer is not None
        sequences: list[list[int]] = []
        limit = envs.VLLM_MAX_NUM_BAD_WORDS
        if len(words) > limit:  # said before they are tokenized, which takes long for many
            raise RequestError(
                f"at most {limit} bad_words are allowed (VLLM_MAX_NUM_BAD_WORDS), got {len(words)}.",
                param="bad_words",
                value=len(words),
            )
        for word in words:
            bare = self._tokenizer.encode(word.lstrip(" ") or word, add_special_tokens=False)
            spaced = self._tokenizer.encode(" " + word.lstrip(" "), add_special_tokens=False)
            sequences += [bare] if bare else []
            if spaced and (not bare or (spaced[0] != bare[0] and len(spaced) == len(bare))):
                sequences.append(spaced)
        if len(sequences) > limit:
            raise RequestError(
                f"bad_words give {len(sequences)} token sequences; at most {limit} are allowed "
                "(VLLM_MAX_NUM_BAD_WORDS).",
                param="bad_words",
                value=len(sequences),
            )
        for sequence in sequences:
            self._check_ids("bad_words", sequence)
        return sequences

    def _for_sequence(self, params: SamplingParams, index: int) -> SamplingParams:
        """Parameters of choice ``index``. Every sequence has a seed of its own from here on, so that neither
        batching nor preemption changes what it draws."""
        if params.is_greedy and params.n == 1:
            return params
        one = params.clone()
        one.n = 1
        if params.seed is None:
            one.seed = self._seeds.getrandbits(63)
        else:
            one.seed = (params.seed + index + 2**63) % 2**64 - 2**63
        return one


def _check_size(params: SamplingParams, num_prompt_tokens: int) -> None:
    """Every sequence carries prompt and lists of its own to the engine; n of them must stay within reason."""
    lists = (params.logit_bias, params.stop_token_ids, params.stop_set, params.allowed_token_ids)
    words = sum(map(len, params.bad_words_token_ids))
    size = params.n * (num_prompt_tokens + words + sum(len(values or ()) for values in lists))
    if params.n > 1 and size > MAX_REQUEST_IDS:
        raise RequestError(
            f"n={params.n} sequences with their prompts and token id lists hold {size} ids, more than the "
            f"{MAX_REQUEST_IDS} one request may; lower n or send several requests.",
            value=params.n,
        )


def _check_something_is_left(params: SamplingParams) -> None:
    """Refuse what leaves no token to sample."""
    if params.allowed_token_ids is None:
        return
    banned = {ids[0] for ids in params.bad_words_token_ids if len(ids) == 1}
    left = set(params.allowed_token_ids) - banned
    if params.min_tokens:
        left -= set(params.stop_set)
    if not left:
        raise RequestError(
            "allowed_token_ids leaves no token to sample: bad_words and min_tokens (no stop token yet) exclude all.",
            param="allowed_token_ids",
        )
