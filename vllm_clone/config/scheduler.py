"""What one step may hold."""

from dataclasses import dataclass
from typing import Literal

from vllm_clone.config.flags import (
    HumanInt,
    flag,
)
from vllm_clone.config.support import later, not_here


@dataclass
class SchedulerConfig:
    """What one step may hold."""

    max_num_batched_tokens: HumanInt | None = flag(None, "Most tokens in one step.")
    max_num_scheduled_tokens: HumanInt | None = flag(
        None,
        "Tokens the scheduler may hand out per step, when it should be less than the batch capacity.",
        nullable=True,
    )
    max_num_seqs: int | None = flag(None, "Most sequences that run at once.")
    max_num_active_seqs: int | None = flag(
        None, "Requests allowed in the running set, without shrinking buffers or graphs.", nullable=True
    )
    max_num_queued_reqs: int | None = flag(None, "Requests in flight above which new ones get HTTP 503.", nullable=True)
    max_num_queued_tokens: HumanInt | None = flag(
        None, "Prompt tokens waiting above which new requests get HTTP 503.", nullable=True
    )
    long_prefill_token_threshold: int = flag(0, "Most tokens per step of one request among others; 0 = any.")
    long_prefill_token_threshold_adaptive: bool = flag(
        False, "Raise the cap to at least budget // (running + waiting)."
    )
    scheduling_policy: Literal["fcfs", "priority"] = flag("fcfs", "Order of service: arrival, or request priority.")
    enable_chunked_prefill: bool | None = flag(None, "Split long prompts over steps; on by default.")
    disable_chunked_mm_input: bool = flag(
        False, "Never splits one media item across steps.", support=later("Multimodal inputs")
    )
    scheduler_cls: str | None = flag(None, "Class path of a replacement scheduler.", nullable=True)
    scheduler_reserve_full_isl: bool = flag(True, "Admit a request only when its whole sequence fits the free blocks.")
    watermark: float = flag(0.0, "Fraction of KV blocks kept free when admitting requests.")
    prefill_schedule_interval: int = flag(
        1,
        "In DP deployments, new prompts are admitted only every N-th step, on the same steps on all ranks.",
        support=later("Data-parallel engines"),
    )
    disable_hybrid_kv_cache_manager: bool | None = flag(
        None, "Give all attention layers equally sized KV, ignoring that sliding-window layers need less."
    )
    async_scheduling: bool | None = flag(
        None,
        "Choose the next step while one runs; stops are then seen a step late.",
        support=not_here("on a CPU choosing a step takes 1 % of computing it, so there is nothing to hide"),
        working=(False,),
    )
    stream_interval: int = flag(1, "Tokens per streamed chunk; the first and the last are sent at once.")
    max_num_partial_prefills: int = flag(
        1, "Prompts that may be partly processed at the same time.", support=later("Limits on partial prefills")
    )
    max_long_partial_prefills: int = flag(
        1,
        "How many of those may exceed the long-prompt threshold, so that short prompts overtake.",
        support=later("Limits on partial prefills"),
    )
