"""What passes between the scheduler and the workers in one step: plain data, no torch."""

from dataclasses import dataclass, field

from vllm_clone.messages import LogprobRows
from vllm_clone.sampling_params import SamplingParams

BlockIds = tuple[list[int], ...]
"""Block ids per KV cache group."""


@dataclass(slots=True)
class NewRequest:
    """A request that enters (or, after preemption, re-enters) the workers' batch, whole."""

    req_id: str
    token_ids: list[int]
    """Prompt, followed by outputs when the request resumes after preemption."""
    num_prompt_tokens: int
    sampling_params: SamplingParams
    block_ids: BlockIds
    num_computed_tokens: int


@dataclass(slots=True)
class RunningRequests:
    """Known requests as columns; row i of every list belongs to ``req_ids[i]``."""

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[BlockIds | None] = field(default_factory=list)
    """Blocks to append to the request's tables, None when there are none."""
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class GrammarMasks:
    """What the grammars of some requests allow as the next token. Only of requests that sample in this step."""

    req_ids: list[str]
    words: bytearray
    """⌈V/32⌉ little-endian 32-bit words per request: bit v % 32 of word v // 32 allows token v."""


@dataclass(slots=True)
class SchedulerOutput:
    """One step's work. A request appears either in ``new`` or in ``running``."""

    new: list[NewRequest]
    running: RunningRequests
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str] = field(default_factory=set)
    """Finished or aborted since the last step: drop their state."""
    preempted_req_ids: set[str] = field(default_factory=set)
    grammar: GrammarMasks | None = None


@dataclass(slots=True)
class ModelRunnerOutput:
    """What the workers return for one step."""

    sampled_token_ids: dict[str, list[int]]
    """Only requests whose prefill is complete; one id each without speculation."""
    logprobs: dict[str, LogprobRows] = field(default_factory=dict)
    prompt_logprobs: dict[str, LogprobRows] = field(default_factory=dict)
    """Rows for the prompt positions this step computed; the scheduler joins chunks."""
    replayed: bool = False
    """Whether the forward pass was replayed from a recording."""
