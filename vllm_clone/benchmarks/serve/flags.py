"""Every flag of `vllm bench serve`: its type, default and meaning, and the data set it belongs to."""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from vllm_clone.benchmarks.serve.backends import BACKENDS, REFUSED_BACKENDS

DATASETS = {
    "random": "random tokens, of exact length",
    "prefix_repetition": "random prompts that share prefixes",
    "sharegpt": "conversations of ShareGPT's JSON",
    "sonnet": "lines of a text file",
    "burstgpt": "lengths of BurstGPT's CSV",
    "custom": "prompts of a JSONL file",
    "spec_bench": "questions of Spec-Bench's JSONL",
    "speed_bench": "messages of a SPEED-Bench directory",
    "timed_trace": "lengths, times and shared blocks of a trace",
    "hf": "a data set of the Hugging Face hub, from a local file",
}
REFUSED_DATASETS = {
    "random-mm": "needs image input",
    "random-rerank": "needs rerank models",
    "custom_audio": "needs audio input",
    "custom_image": "needs image input",
}
SPEED_SUBSETS = ("qualitative", "throughput_1k", "throughput_2k", "throughput_8k", "throughput_16k", "throughput_32k")


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag.

    ``kind`` is ``switch``, ``both`` (with a ``--no-`` form), ``list``, or a function of the text; ``dataset`` is the
    only one it works with, None for all; ``refused`` says why it cannot be used here.
    """

    name: str
    kind: Any
    default: Any
    help: str
    group: str = "Load"
    choices: tuple[str, ...] = ()
    dataset: str | None = None
    refused: str | None = None

    @property
    def dest(self) -> str:
        return self.name[2:].replace("-", "_")

    def add_to(self, parser: argparse.ArgumentParser) -> argparse.Action:
        """Add the flag; one that is not given leaves no attribute."""
        text = self.help + ("" if self.default in (None, False) else f" (default: {self.default})")
        if self.refused:
            text = f"Not here: {self.refused}."
        options: dict[str, Any] = {"dest": self.dest, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        if self.kind == "switch":
            return parser.add_argument(self.name, action="store_true", **options)
        if self.kind == "both":
            return parser.add_argument(self.name, action=argparse.BooleanOptionalAction, **options)
        metavar = "{" + ",".join(self.choices) + "}" if self.choices else self.dest.upper()
        if self.kind == "list":
            return parser.add_argument(self.name, nargs="+", metavar=metavar, **options)
        choices = list(self.choices) or None
        return parser.add_argument(self.name, type=self.kind, choices=choices, metavar=metavar, **options)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _at_least(least: float, kind: Callable[[str], Any], above: bool = False) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from error
        if not (value > least if above else value >= least):
            raise argparse.ArgumentTypeError(f"{text}: must be {'above' if above else 'at least'} {least}")
        return value

    return parse


_COUNT, _POSITIVE, _SECONDS = _at_least(0, int), _at_least(1, int), _at_least(0, float)
_RATE = _at_least(0, float, above=True)

_TARGET = (
    ("--backend", str, "openai", "Protocol to speak.", (*BACKENDS, *REFUSED_BACKENDS)),
    ("--base-url", str, None, "Server, instead of --host and --port; needed for https."),
    ("--host", str, "127.0.0.1", "Server's host."),
    ("--port", _POSITIVE, 8000, "Server's port."),
    ("--endpoint", str, None, "Path of the requests; the backend's own when not given."),
    ("--header", "list", None, "KEY=VALUE headers of every request."),
    ("--insecure", "switch", False, "Accept any TLS certificate."),
    ("--model", str, None, "Model; the server's first one when not given."),
    ("--served-model-name", str, None, "Name of the model in requests, where it is not --model."),
    ("--tokenizer", str, None, "Directory, file or hub id of the tokenizer; the model's when not given."),
    ("--tokenizer-mode", str, "auto", "How to load the tokenizer.", ("auto", "slow")),
    ("--skip-tokenizer-init", "switch", False, "Use no tokenizer; only for data sets that come as text."),
    ("--trust-remote-code", "switch", False, "Run code that a tokenizer brings along."),
    ("--lora-modules", "list", None, "Names of LoRA adapters to send as the model."),
    ("--lora-assignment", str, "random", "Which request gets which adapter.", ("random", "round-robin")),
    ("--request-id-prefix", str, None, "In front of the x-request-id of each request (default: bench-<8 hex>-)."),
)
_REQUEST = (
    ("--logprobs", _COUNT, None, "Log-probabilities to ask for."),
    ("--ignore-eos", "switch", False, "Generate to the length asked for; always on for random and timed_trace."),
    ("--use-beam-search", "switch", False, ""),
    ("--top-p", float, None, "Sampling parameter sent with every request."),
    ("--top-k", int, None, "Sampling parameter sent with every request."),
    ("--min-p", float, None, "Sampling parameter sent with every request."),
    ("--temperature", float, None, "Sampling parameter sent with every request."),
    ("--frequency-penalty", float, None, "Sampling parameter sent with every request."),
    ("--presence-penalty", float, None, "Sampling parameter sent with every request."),
    ("--repetition-penalty", float, None, "Sampling parameter sent with every request."),
    ("--extra-body", _object, None, "JSON object merged into every request; wins over the sampling parameters."),
    ("--chat-template-kwargs", _object, None, "JSON object for the chat template that is rendered here."),
)
_LOAD = (
    ("--num-prompts", _COUNT, 1000, "Requests to send; 0: every row of a file."),
    ("--request-rate", _RATE, float("inf"), "Requests per second; inf: all at once."),
    ("--burstiness", _RATE, 1.0, "Shape of the gamma-distributed gaps: 1 Poisson, below burstier, above steadier."),
    ("--max-concurrency", _POSITIVE, None, "Most requests in flight."),
    ("--ramp-up-strategy", str, None, "Let the rate grow over the run.", ("linear", "exponential")),
    ("--ramp-up-start-rps", _COUNT, None, "Requests per second at the start of a ramp-up."),
    ("--ramp-up-end-rps", _COUNT, None, "Requests per second at the end of a ramp-up."),
    ("--probe-request-rate", _SECONDS, 0.0, "Also send requests for one token, this many per second."),
    ("--num-warmups", _COUNT, 0, "Requests before the run that do not count."),
    ("--ready-check-timeout-sec", _COUNT, 0, "Wait so long for the server to answer; 0: do not check."),
    ("--seed", _COUNT, 0, "Seed of everything random."),
    ("--profile", "switch", False, "Let the server profile the run (POST /start_profile, /stop_profile)."),
    ("--disable-tqdm", "switch", False, "No progress bar."),
)
_REPORT = (
    ("--percentile-metrics", str, None, "Comma list of the latencies to report (default: ttft,tpot,itl)."),
    ("--metric-percentiles", str, "99", "Comma list of percentiles."),
    ("--goodput", "list", None, "KEY:MILLISECONDS limits (ttft, tpot, e2el) that a good request meets."),
    ("--save-result", "switch", False, "Write the result as JSON."),
    ("--append-result", "switch", False, "Append to the result file instead of replacing it."),
    ("--save-detailed", "switch", False, "With the lists per request."),
    ("--result-dir", str, None, "Directory of the result file (default: the current one)."),
    ("--result-filename", str, None, "Name of the result file."),
    ("--label", str, None, "Label in the result and its file name (default: the backend)."),
    ("--metadata", "list", None, "KEY=VALUE to keep in the result."),
    ("--plot-timeline", "switch", False, "Write the requests' timeline as an HTML page beside the result."),
    ("--timeline-itl-thresholds", str, "25,50", "Two gaps in ms above which the timeline turns yellow and red."),
    ("--plot-dataset-stats", "switch", False, ""),
)
_DATA = (
    ("--dataset-name", str, "random", "Where prompts come from.", (*DATASETS, *REFUSED_DATASETS)),
    ("--dataset-path", str, None, "File or directory of the data set."),
    ("--input-len", _POSITIVE, None, "Input length of the sets random and sonnet."),
    ("--output-len", _POSITIVE, None, "Output length, for every set that takes one."),
    ("--no-oversample", "switch", False, "Send fewer requests rather than repeat rows."),
    ("--disable-shuffle", "switch", False, "Keep the order of the file."),
    ("--skip-chat-template", "switch", False, "Send prompts as they are, not as a user's message."),
    ("--enable-multimodal-chat", "switch", False, ""),
)
_SETS = (
    ("--random-input-len", _POSITIVE, 1024, "Tokens of a prompt.", "random"),
    ("--random-output-len", _POSITIVE, 128, "Tokens to generate.", "random"),
    ("--random-prefix-len", _COUNT, 0, "Tokens in front of every prompt, the same for all.", "random"),
    ("--random-range-ratio", str, "0.0", 'Spread of lengths, 0 to 1, or {"input": r, "output": r}.', "random"),
    ("--sonnet-input-len", _POSITIVE, 550, "Tokens of a prompt, about.", "sonnet"),
    ("--sonnet-output-len", _POSITIVE, 150, "Tokens to generate.", "sonnet"),
    ("--sonnet-prefix-len", _COUNT, 200, "Tokens that all prompts share, about.", "sonnet"),
    ("--sharegpt-output-len", _POSITIVE, None, "Tokens to generate, instead of the answer's length.", "sharegpt"),
    ("--custom-output-len", _at_least(-1, int), 256, "Tokens to generate; -1: output_tokens of each row.", "custom"),
    ("--spec-bench-output-len", _POSITIVE, 256, "Tokens to generate.", "spec_bench"),
    ("--spec-bench-category", str, None, "Only rows of this category.", "spec_bench"),
    ("--speed-bench-output-len", _POSITIVE, 4096, "Tokens to generate.", "speed_bench"),
    ("--speed-bench-category", str, None, "Only rows of this category.", "speed_bench"),
    ("--prefix-repetition-prefix-len", _POSITIVE, 256, "Tokens of a shared prefix.", "prefix_repetition"),
    ("--prefix-repetition-suffix-len", _POSITIVE, 256, "Tokens of each prompt's own.", "prefix_repetition"),
    ("--prefix-repetition-num-prefixes", _POSITIVE, 10, "Different prefixes.", "prefix_repetition"),
    ("--prefix-repetition-output-len", _POSITIVE, 128, "Tokens to generate.", "prefix_repetition"),
    ("--timed-trace-chunk-hash-size", _POSITIVE, 16, "Tokens per hash id.", "timed_trace"),
    ("--timed-trace-sec-multiplier", _RATE, 1.0, "Seconds per unit of the timestamps.", "timed_trace"),
    ("--timed-trace-label-timestamp", str, "timestamp", "Name of the field.", "timed_trace"),
    ("--timed-trace-label-input-length", str, "input_length", "Name of the field.", "timed_trace"),
    ("--timed-trace-label-output-length", str, "output_length", "Name of the field.", "timed_trace"),
    ("--timed-trace-label-hash-ids", str, "hash_ids", "Name of the field.", "timed_trace"),
    ("--hf-name", str, None, "Hub id of the set, where the path does not tell.", "hf"),
    ("--hf-output-len", _POSITIVE, None, "Tokens to generate.", "hf"),
    ("--no-stream", "switch", False, "Read the whole file first, which is what always happens.", "hf"),
    ("--blazedit-min-distance", _SECONDS, 0.0, "Least edit distance of a row, 0 to 1.", "hf"),
    ("--blazedit-max-distance", _SECONDS, 1.0, "Greatest edit distance of a row, 0 to 1.", "hf"),
)
_MULTIMODAL, _AUDIO, _RERANK = "needs image or video input", "needs audio input", "needs rerank or embedding models"
_REFUSED = {
    "--use-beam-search": "vLLM's own does nothing with it either",
    "--plot-dataset-stats": "needs a plotting library; the lengths are in the result with --save-detailed",
    "--enable-multimodal-chat": _MULTIMODAL,
    "--custom-ensure-client-side-data": _MULTIMODAL,
    "--random-batch-size": _RERANK,
    "--no-reranker": _RERANK,
    "--random-mm-base-items-per-request": _MULTIMODAL,
    "--random-mm-num-mm-items-range-ratio": _MULTIMODAL,
    "--random-mm-limit-mm-per-prompt": _MULTIMODAL,
    "--random-mm-bucket-config": _MULTIMODAL,
    "--asr-min-audio-len-sec": _AUDIO,
    "--asr-max-audio-len-sec": _AUDIO,
    "--bfcl-categories": "needs tool calls",
    "--hf-subset": "a local file is one subset; name that file",
    "--hf-split": "a local file is one split; name that file",
}


def all_flags() -> Iterator[Flag]:
    """Every flag, in the order of the help page."""
    groups = {"Target": _TARGET, "Request": _REQUEST, "Load": _LOAD, "Report": _REPORT, "Data": _DATA}
    for group, rows in groups.items():
        for name, kind, default, text, *choices in rows:
            yield Flag(name, kind, default, text, group, choices[0] if choices else (), refused=_REFUSED.get(name))
    for name, kind, default, text, dataset in _SETS:
        yield Flag(name, kind, default, text, "Data", dataset=dataset)
    yield Flag(
        "--speed-bench-dataset-subset", str, "qualitative", "File to read.", "Data", SPEED_SUBSETS, "speed_bench"
    )
    yield Flag("--self-timed", "both", None, "Send at the trace's times (default: yes).", "Load", dataset="timed_trace")
    listed = {row[0] for rows in groups.values() for row in rows}
    for name, reason in _REFUSED.items():
        if name not in listed:
            form: Any = "switch" if name in ("--no-reranker", "--custom-ensure-client-side-data") else str
            yield Flag(name, form, None, "", "Data", refused=reason)
