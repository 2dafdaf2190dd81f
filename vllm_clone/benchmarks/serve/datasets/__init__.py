"""Data sets: the samples of a run, made from a seed or read from a file."""

from vllm_clone.benchmarks.serve.datasets.files import burstgpt, custom, sharegpt, sonnet, spec_bench, speed_bench
from vllm_clone.benchmarks.serve.datasets.hub import hub_rows
from vllm_clone.benchmarks.serve.datasets.request import Request
from vllm_clone.benchmarks.serve.datasets.synthetic import prefix_repetition, random_prompts
from vllm_clone.benchmarks.serve.datasets.trace import timed_trace
from vllm_clone.benchmarks.serve.sample import Sample
from vllm_clone.errors import ConfigError, RequestError

__all__ = ["Request", "load"]

_MAKERS = {
    "random": random_prompts,
    "prefix_repetition": prefix_repetition,
    "sharegpt": sharegpt,
    "sonnet": sonnet,
    "burstgpt": burstgpt,
    "custom": custom,
    "spec_bench": spec_bench,
    "speed_bench": speed_bench,
    "timed_trace": timed_trace,
    "hf": hub_rows,
}


def load(name: str, request: Request) -> list[Sample]:
    """The samples of a data set, at least one.

    Raises:
        ConfigError: the file cannot be read, is no such data set, or gives no sample.
    """
    try:
        samples = _MAKERS[name](request)
    except RequestError as error:  # of the tokenizer or the chat template
        raise ConfigError(f"--dataset-name {name}: {error}") from error
    if not samples:
        raise ConfigError(f"--dataset-name {name}: no sample came out of it; none fits, or it is empty.")
    return samples
