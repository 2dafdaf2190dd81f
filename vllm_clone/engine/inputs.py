"""What a request starts from."""

from dataclasses import dataclass, field

from vllm_clone.messages import EngineCoreRequest
from vllm_clone.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class TokensPrompt:
    """A prompt that is already tokenized; ``prompt`` is its text when that is known."""

    prompt_token_ids: list[int]
    prompt: str | None = None


PromptType = str | TokensPrompt


@dataclass(slots=True)
class ProcessedRequest:
    """A validated request: what its consumer is told about, and the sequences the engine generates."""

    request_id: str
    """The consumer's id."""
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    """Resolved; ``n`` may be more than 1."""
    arrival_time: float
    """Wall clock, seconds."""
    sequences: list[EngineCoreRequest] = field(default_factory=list)
    """One per choice, with ids of the engine's own and n = 1."""
