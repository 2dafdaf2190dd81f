"""Sampling parameters of one request; plain data that also travels on the wire."""

import enum
import math
from types import NoneType
from typing import Any

import msgspec

from vllm_clone import envs
from vllm_clone.errors import RequestError

GREEDY_EPSILON = 1e-5
MIN_TEMPERATURE = 0.01
MAX_LOGPROB_TOKEN_IDS = 128
MAX_INT32 = 2**31 - 1


class RequestOutputKind(enum.IntEnum):
    """What a consumer receives: all text so far, only the new part, or one output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class RepetitionDetectionParams(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    """Stop when the last ``min_count`` × L outputs are equal copies, for any L in the size range (0 = off)."""

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0


class StructuredOutputsParams(msgspec.Struct, omit_defaults=True, kw_only=True, gc=False, frozen=True):
    """A constraint that the output must follow: exactly one of the first six, and how JSON is written."""

    json: str | dict[str, Any] | None = None
    """A JSON schema, as a value or as text."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """GBNF with a rule named root, or Lark with one named start."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | None = None
    """JSON text of a structural tag: free text in which marks begin something that follows a schema."""
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    """Regex of what may stand between the parts of JSON."""


class SamplingParams(msgspec.Struct, omit_defaults=True, kw_only=True, gc=False):
    """How one request is sampled and when it stops. Field meanings and ranges follow vLLM's API.

    Fields under "resolved" are filled by the input processor, not by users.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    repetition_detection: RepetitionDetectionParams | None = None
    stream_interval: int | None = None
    skip_reading_prefix_cache: bool | None = None
    truncate_prompt_tokens: int | None = None
    extra_args: dict[str, Any] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    # resolved
    eos_token_id: int | None = None
    stop_set: list[int] = []
    """Every id that min_tokens masks: EOS, secondary EOS ids and stop_token_ids, also with ignore_eos."""
    bad_words_token_ids: list[list[int]] = []

    def __post_init__(self) -> None:
        self._check_types()
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop_token_ids = list(dict.fromkeys(self.stop_token_ids))
        self.bad_words = list(dict.fromkeys(self.bad_words))
        if self.seed == -1:
            self.seed = None
        if self.top_k == -1:
            self.top_k = 0
        # Beyond any vocabulary and any output; larger integers cannot travel on the wire.
        self.top_k = min(self.top_k, MAX_INT32)
        if self.stream_interval is not None:
            self.stream_interval = min(self.stream_interval, MAX_INT32)
        if self.is_greedy:
            self._verify_truncation()  # these values are dropped, but a wrong one is still the caller's mistake
            self.temperature, self.top_p, self.top_k, self.min_p = 0.0, 1.0, 0, 0.0
        elif GREEDY_EPSILON <= self.temperature < MIN_TEMPERATURE:
            self.temperature = MIN_TEMPERATURE

    def _check_types(self) -> None:
        """Python callers may pass anything; HTTP and the wire have checked already. None stands for an empty list."""
        for name in _LISTS:
            if getattr(self, name) is None:
                setattr(self, name, [])
        for name, (types, what) in _TYPES.items():
            value = getattr(self, name)
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise RequestError(f"{name} must be {what}, got {value!r}.", param=name)

    @property
    def is_greedy(self) -> bool:
        return 0.0 <= self.temperature < GREEDY_EPSILON

    def verify(self) -> None:
        """Check every rule that needs neither model nor tokenizer.

        Raises:
            RequestError: naming the field, the rule and the value.
        """
        limit = envs.VLLM_MAX_N_SEQUENCES
        _require(self.n >= 1, None, self.n, "n must be at least 1")
        _require(self.n <= limit, None, self.n, f"n must be at most {limit} (VLLM_MAX_N_SEQUENCES)")
        if not (math.isfinite(self.temperature) and 0 <= self.temperature <= 2):
            _fail("temperature", self.temperature, "temperature must be a finite number in [0, 2]")
        self._verify_truncation()
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-2 <= value <= 2, None, value, f"{name} must be in [-2, 2]")
        rep = self.repetition_penalty
        _require(math.isfinite(rep) and rep > 0, None, rep, "repetition_penalty must be a finite number above 0")
        _require(not (self.is_greedy and self.n > 1), None, self.n, "n must be 1 with greedy sampling (temperature 0)")
        if self.max_tokens is not None:
            _require(self.max_tokens >= 1, "max_tokens", self.max_tokens, "max_tokens must be at least 1")
        _require(self.min_tokens >= 0, None, self.min_tokens, "min_tokens must be at least 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _fail(None, self.min_tokens, f"min_tokens must be at most max_tokens ({self.max_tokens})")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or value >= -1, name, value, f"{name} must be -1 (whole vocabulary) or at least 0")
        ids = self.logprob_token_ids
        if ids is not None and len(ids) > MAX_LOGPROB_TOKEN_IDS:
            _fail("logprob_token_ids", len(ids), f"logprob_token_ids holds at most {MAX_LOGPROB_TOKEN_IDS} ids")
        _require(all(self.stop), None, "", "stop strings must not be empty")
        _require(not self.stop or self.detokenize, None, False, "stop strings need detokenize=True")
        _require(all(self.bad_words), None, "", "bad_words must not be empty strings")
        if self.allowed_token_ids is not None:
            _require(bool(self.allowed_token_ids), "allowed_token_ids", [], "allowed_token_ids must not be empty")
        rd = self.repetition_detection
        if rd is not None and rd.max_pattern_size:
            ok = rd.max_pattern_size >= max(rd.min_pattern_size, 1) and rd.min_count >= 2 and rd.min_pattern_size >= 0
            rule = "repetition_detection needs 0 <= min_pattern_size <= max_pattern_size and min_count >= 2"
            _require(ok, None, rd.min_count, rule)

    def _verify_truncation(self) -> None:
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "top_p must be in (0, 1]")
        _require(self.top_k >= 0, None, self.top_k, "top_k must be -1 or 0 (off) or at least 1")
        _require(0 <= self.min_p <= 1, None, self.min_p, "min_p must be in [0, 1]")

    def clone(self) -> "SamplingParams":
        """A copy that may be edited field by field (lists are shared and treated as immutable)."""
        return msgspec.structs.replace(self)


_LISTS = ("stop", "stop_token_ids", "bad_words")
_INT, _FLOAT, _MAYBE_INT = ((int,), "an integer"), ((int, float), "a number"), ((int, NoneType), "an integer or None")
_LIST = ((list, tuple), "a list")
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "n": _INT, "top_k": _INT, "min_tokens": _INT, "max_tokens": _MAYBE_INT, "seed": _MAYBE_INT,
    "logprobs": _MAYBE_INT, "prompt_logprobs": _MAYBE_INT, "stream_interval": _MAYBE_INT,
    "truncate_prompt_tokens": _MAYBE_INT, "temperature": _FLOAT, "top_p": _FLOAT, "min_p": _FLOAT,
    "presence_penalty": _FLOAT, "frequency_penalty": _FLOAT, "repetition_penalty": _FLOAT,
    "stop": ((list, tuple, str), "a string or a list of strings"), "stop_token_ids": _LIST, "bad_words": _LIST,
    "logit_bias": ((dict, NoneType), "a dict or None"),
    "allowed_token_ids": ((list, tuple, NoneType), "a list or None"),
    "structured_outputs": ((StructuredOutputsParams, NoneType), "StructuredOutputsParams or None"),
}  # fmt: skip


def _require(ok: bool, param: str | None, value: Any, rule: str) -> None:
    if not ok:
        _fail(param, value, rule)


def _fail(param: str | None, value: Any, rule: str) -> None:
    raise RequestError(f"{rule}, got {value}.", param=param, value=value)
