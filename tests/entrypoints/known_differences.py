"""Where this server answers otherwise than the recorded one, why, and what it answers instead."""

from typing import NamedTuple


class Difference(NamedTuple):
    """Our answer: its status, the error object's ``type`` and ``param`` when there is one.

    ``only``: the one place where the answer differs; None when it is another answer altogether.
    """

    reason: str
    status: int
    type: str | None = None
    param: str | None = None
    only: str | None = None


NOT_IMPLEMENTED = "NotImplementedError"
BEAM = Difference("beam search is not implemented yet", 501, NOT_IMPLEMENTED, "use_beam_search")
FIELD_NAMED = Difference("the field at fault is named", 400, "BadRequestError", "structured_outputs")
PLACE_IN_MESSAGE = Difference("the message says where, as with other grammars", 400, "BadRequestError")
NO_TOOLS = Difference("tool parsers are not implemented yet, as if --enable-auto-tool-choice were off", 400,
                      "BadRequestError")  # fmt: skip
NO_ROUTE = Difference("this route is not implemented yet", 404)
NO_METRICS = Difference("per-request metrics are not implemented yet", 200, only="answer.metrics")

DIFFERENCES: dict[tuple[str, str], Difference] = {
    ("04", "beam search n=2"): BEAM,
    ("04", "beam search length_penalty stream"): BEAM,
    ("10", "beam"): BEAM,
    ("30", "is_scaling_elastic_ep"): NO_ROUTE,
    ("30", "scale_elastic_ep empty"): NO_ROUTE,
    ("40", "echo+logprobs+beam"): BEAM,
    ("42", "tools name with space"): NO_TOOLS,
    ("42", "structural_tag bad"): PLACE_IN_MESSAGE,
    ("42", "structured two kinds"): FIELD_NAMED,
    ("42", "structured none"): FIELD_NAMED,
    ("42", "both response_format and structured_outputs"): FIELD_NAMED,
    ("42", "use_beam_search stream"): BEAM,
    ("42", "use_beam_search n null"): BEAM,
    ("50", "no key on /invocations is open"): NO_ROUTE,
    ("50", "no key on /generative_scoring is open"): NO_ROUTE,
    ("50", "request id on completion"): NO_METRICS,
    ("50", "alias name"): NO_METRICS,
    ("50", "ORCA text header"): NO_METRICS,
    ("50", "ORCA json header"): NO_METRICS,
}


class MetricDifference(NamedTuple):
    """Labels that a series has here as well; None when we have no such series."""

    reason: str
    labels: tuple[str, ...] | None


NO_TOOL_SERIES = MetricDifference("tool parsers are not implemented yet", None)
METRIC_DIFFERENCES: dict[str, MetricDifference] = {
    "vllm:tool_call_parser_invocations_total": NO_TOOL_SERIES,
    "vllm:tool_call_parser_invocations_created": NO_TOOL_SERIES,
    "vllm:cache_config_info": MetricDifference(
        "one label per cache setting, and this server has fewer settings",
        (
            "engine", "block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency",
            "kv_cache_memory_bytes", "cache_dtype", "enable_prefix_caching", "prefix_caching_hash_algo",
            "gpu_memory_utilization",
        ),
    ),
}  # fmt: skip
