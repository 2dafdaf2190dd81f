"""The checked options of a run. Whatever cannot be done is refused here, before anything is sent."""

import argparse
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm_clone import envs
from vllm_clone.benchmarks.serve.arrivals import RampUp
from vllm_clone.benchmarks.serve.backends import BACKENDS, REFUSED_BACKENDS, Backend
from vllm_clone.benchmarks.serve.flags import REFUSED_DATASETS, all_flags
from vllm_clone.benchmarks.serve.metrics import LATENCIES
from vllm_clone.errors import ConfigError

SAMPLING = (
    "top_p", "top_k", "min_p", "temperature", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip
GOODPUT_NAMES = ("ttft", "tpot", "e2el")
NO_PATH = ("random", "prefix_repetition")
INPUT_LEN_OF = {"random": "random_input_len", "sonnet": "sonnet_input_len"}
OUTPUT_LEN_OF = {
    "random": "random_output_len", "sonnet": "sonnet_output_len", "sharegpt": "sharegpt_output_len",
    "custom": "custom_output_len", "hf": "hf_output_len", "spec_bench": "spec_bench_output_len",
    "prefix_repetition": "prefix_repetition_output_len",
}  # fmt: skip


@dataclass
class Options:
    """What a run does. Lengths are tokens, rates per second.

    Attributes:
        flags: value of every flag, defaults filled in; what only a data set reads stays there.
        model: id of the model for the result and the tokenizer; '' until the server was asked.
        model_name: name of the model in requests; '' until the server was asked.
        sampling: parameters to send, then what --extra-body adds.
    """

    flags: dict[str, Any]
    backend_name: str
    backend: Backend
    base_url: str
    endpoint: str
    headers: dict[str, str]
    model: str
    model_name: str
    tokenizer: str | None
    has_tokenizer: bool
    request_id_prefix: str
    extra_body: dict[str, Any]
    num_prompts: int
    request_rate: float
    burstiness: float
    max_concurrency: int | None
    ramp_up: RampUp | None
    self_timed: bool
    metrics: list[str]
    percentiles: list[float]
    goodput: dict[str, float] | None
    label: str | None
    save_detailed: bool
    append_result: bool
    result_dir: str | None
    result_filename: str | None
    metadata: dict[str, str] = field(default_factory=dict)

    @property
    def saves(self) -> bool:
        return bool(self.flags["save_result"] or self.append_result)


def options_of(args: argparse.Namespace) -> Options:
    """Check the flags that were given.

    Raises:
        ConfigError: one of them cannot be had, or not together with another.
    """
    given = {flag.dest: flag for flag in all_flags() if hasattr(args, flag.dest)}
    flags: dict[str, Any] = {flag.dest: getattr(args, flag.dest, flag.default) for flag in all_flags()}
    for flag in given.values():
        if flag.refused:
            raise ConfigError(f"{flag.name}: not available: {flag.refused}.")
        if flag.dataset not in (None, flags["dataset_name"]):
            raise ConfigError(f"{flag.name} only works with --dataset-name {flag.dataset}.")
    _check_dataset(flags, given)
    backend_name = flags["backend"]
    if backend_name in REFUSED_BACKENDS:
        raise ConfigError(f"--backend {backend_name}: not available: it {REFUSED_BACKENDS[backend_name]}.")
    backend = BACKENDS[backend_name]
    _check_backend(flags, given, backend)
    _check_report(flags, given)
    return Options(
        flags=flags,
        backend_name=backend_name,
        backend=backend,
        base_url=flags["base_url"] or f"http://{_bracketed(flags['host'])}:{flags['port']}",
        endpoint=_endpoint(flags["endpoint"], backend_name, backend),
        headers=_headers(flags["header"] or []),
        model=flags["model"] or "",
        model_name=flags["served_model_name"] or flags["model"] or "",
        tokenizer=flags["tokenizer"] or flags["model"],
        has_tokenizer=not flags["skip_tokenizer_init"],
        request_id_prefix=flags["request_id_prefix"] or f"bench-{secrets.token_hex(4)}-",
        extra_body=_extra_body(flags, backend),
        num_prompts=flags["num_prompts"],
        request_rate=flags["request_rate"],
        burstiness=flags["burstiness"],
        max_concurrency=flags["max_concurrency"],
        ramp_up=_ramp_up(flags),
        self_timed=flags["dataset_name"] == "timed_trace" and flags["self_timed"] is not False,
        metrics=_metrics(flags["percentile_metrics"], backend),
        percentiles=_percentiles(flags["metric_percentiles"]),
        goodput=_goodput(flags["goodput"]),
        label=flags["label"],
        save_detailed=flags["save_detailed"],
        append_result=flags["append_result"],
        result_dir=flags["result_dir"],
        result_filename=flags["result_filename"],
        metadata=dict(_pairs("--metadata", flags["metadata"] or [], "=")),
    )


def _check_dataset(flags: dict[str, Any], given: Iterable[str]) -> None:
    name = flags["dataset_name"]
    if name in REFUSED_DATASETS:
        raise ConfigError(f"--dataset-name {name}: not available: it {REFUSED_DATASETS[name]}.")
    if name in NO_PATH and flags["dataset_path"] is not None:
        raise ConfigError(f"--dataset-path: the data set {name} reads no file; name one that does with --dataset-name.")
    if name not in NO_PATH and flags["dataset_path"] is None:
        raise ConfigError(f"--dataset-name {name} needs --dataset-path.")
    if name in NO_PATH and flags["num_prompts"] == 0:
        raise ConfigError(f"--num-prompts 0: the data set {name} has no rows of its own; give a number.")
    range_ratios(flags["random_range_ratio"])
    if flags["skip_tokenizer_init"] and name not in ("custom", "spec_bench", "speed_bench"):
        raise ConfigError(f"--skip-tokenizer-init: the data set {name} needs a tokenizer.")
    for short, targets in (("input_len", INPUT_LEN_OF), ("output_len", OUTPUT_LEN_OF)):
        if flags[short] is not None:
            if name not in targets:
                raise ConfigError(f"--{short.replace('_', '-')}: the data set {name} has lengths of its own.")
            flags[targets[name]] = flags[short]
    uses_template = name in ("custom", "sonnet", "spec_bench", "speed_bench", "hf")
    if not uses_template:
        for flag in ("skip_chat_template", "chat_template_kwargs"):
            if flag in given:
                raise ConfigError(f"--{flag.replace('_', '-')}: prompts of the data set {name} get no chat template.")


def _check_backend(flags: dict[str, Any], given: Iterable[str], backend: Backend) -> None:
    sampling = [name for name in SAMPLING if flags[name] is not None]
    if sampling and not backend.takes_sampling:
        raise ConfigError(f"--{sampling[0].replace('_', '-')}: not sent by the backend {flags['backend']}.")
    if flags["logprobs"] is not None and not backend.takes_logprobs:
        raise ConfigError(f"--logprobs: not sent by the backend {flags['backend']}.")
    if flags["ignore_eos"] and not backend.takes_ignore_eos:
        raise ConfigError(f"--ignore-eos: not sent by the backend {flags['backend']}.")
    if flags["dataset_name"] == "timed_trace" and not backend.takes_ids:
        raise ConfigError("--dataset-name timed_trace: needs a backend that takes token ids, such as openai.")
    if flags["probe_request_rate"] and not backend.generates:
        raise ConfigError(f"--probe-request-rate: the backend {flags['backend']} generates no tokens.")
    if flags["goodput"] and not backend.generates:
        raise ConfigError(f"--goodput: the backend {flags['backend']} generates no tokens.")
    if "insecure" in given and not str(flags["base_url"]).startswith("https:"):
        raise ConfigError("--insecure: only means something with --base-url https://….")
    if flags["base_url"] is not None and ("host" in given or "port" in given):
        raise ConfigError("--base-url replaces --host and --port; give one or the other.")
    if "lora_assignment" in given and not flags["lora_modules"]:
        raise ConfigError("--lora-assignment: needs --lora-modules.")
    if flags["chat_template_kwargs"] is not None and (backend.is_chat or flags["skip_chat_template"]):
        raise ConfigError("--chat-template-kwargs: no chat template is rendered here; send them with --extra-body.")


def _check_report(flags: dict[str, Any], given: Iterable[str]) -> None:
    saves = flags["save_result"] or flags["append_result"]
    for name in ("save_detailed", "result_dir", "result_filename", "plot_timeline"):
        if name in given and not saves:
            raise ConfigError(f"--{name.replace('_', '-')}: needs --save-result or --append-result.")
    if "timeline_itl_thresholds" in given and not flags["plot_timeline"]:
        raise ConfigError("--timeline-itl-thresholds: needs --plot-timeline.")
    thresholds(flags["timeline_itl_thresholds"])


def thresholds(text: str) -> tuple[float, float]:
    """The two limits of --timeline-itl-thresholds, in milliseconds."""
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        low = high = -1.0
    if not 0 <= low <= high:
        raise ConfigError(f"--timeline-itl-thresholds {text}: must be two numbers, the smaller first.")
    return low, high


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _endpoint(endpoint: str | None, name: str, backend: Backend) -> str:
    if endpoint is None:
        return backend.endpoint
    if not endpoint.endswith(backend.suffixes):
        raise ConfigError(f"--endpoint {endpoint}: must end with {' or '.join(backend.suffixes)} for --backend {name}.")
    return endpoint if endpoint.startswith("/") else "/" + endpoint


def _pairs(flag: str, items: Iterable[str], separator: str) -> Iterable[tuple[str, str]]:
    for item in items:
        key, found, value = item.partition(separator)
        if not found or not key.strip():
            raise ConfigError(f"{flag} {item}: must be KEY{separator}VALUE.")
        yield key.strip(), value.strip()


def _headers(items: Iterable[str]) -> dict[str, str]:
    headers = {} if envs.OPENAI_API_KEY is None else {"Authorization": f"Bearer {envs.OPENAI_API_KEY}"}
    for key, value in _pairs("--header", items, "="):
        if not f"{key}{value}".isprintable() or not f"{key}{value}".isascii() or not key.replace("-", "").isalnum():
            raise ConfigError(f"--header {key}: no valid HTTP header.")
        headers = {k: v for k, v in headers.items() if k.lower() != key.lower()} | {key: value}
    return headers


def _extra_body(flags: dict[str, Any], backend: Backend) -> dict[str, Any]:
    body = {name: flags[name] for name in SAMPLING if flags[name] is not None}
    forced = flags["dataset_name"] in ("random", "timed_trace") and backend.takes_ignore_eos
    if flags["ignore_eos"] or forced:
        body["ignore_eos"] = True
    return body | (flags["extra_body"] or {})


def _ramp_up(flags: dict[str, Any]) -> RampUp | None:
    strategy, start, end = (flags[f"ramp_up_{name}"] for name in ("strategy", "start_rps", "end_rps"))
    if strategy is None:
        if start is not None or end is not None:
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps: need --ramp-up-strategy.")
        return None
    if start is None or end is None:
        raise ConfigError("--ramp-up-strategy: needs --ramp-up-start-rps and --ramp-up-end-rps.")
    if flags["request_rate"] != float("inf"):
        raise ConfigError("--request-rate: a ramp-up sets the rate; give one or the other.")
    if start > end:
        raise ConfigError(f"--ramp-up-start-rps {start}: must not be above --ramp-up-end-rps {end}.")
    if start == 0:
        raise ConfigError("--ramp-up-start-rps 0: no request would ever be sent; start at 1 or more.")
    return RampUp(strategy, start, end)


def _metrics(text: str | None, backend: Backend) -> list[str]:
    names = ["ttft", "tpot", "itl"] if backend.generates else ["e2el"]
    if text is not None:
        names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in LATENCIES:
            raise ConfigError(f"--percentile-metrics {name}: must be of {', '.join(LATENCIES)}.")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= p <= 100 for p in found):
        raise ConfigError(f"--metric-percentiles {text}: must be numbers from 0 to 100, separated by commas.")
    return found


def _goodput(items: list[str] | None) -> dict[str, float] | None:
    if items is None:
        return None
    limits = {}
    for name, text in _pairs("--goodput", items, ":"):
        if name not in GOODPUT_NAMES:
            raise ConfigError(f"--goodput {name}: must be of {', '.join(GOODPUT_NAMES)}.")
        try:
            limits[name] = float(text)
        except ValueError:
            limits[name] = -1.0
        if not limits[name] >= 0:
            raise ConfigError(f"--goodput {name}:{text}: must be milliseconds, at least 0.")
    return limits


def range_ratios(text: str) -> tuple[float, float]:
    """--random-range-ratio as (of inputs, of outputs), each from 0 to below 1."""
    try:
        value = json.loads(text)
        pair = (float(value["input"]), float(value["output"])) if isinstance(value, dict) else (float(value),) * 2
    except (ValueError, KeyError, TypeError):
        pair = (-1.0, -1.0)
    if not all(0 <= r < 1 for r in pair):
        raise ConfigError(
            f'--random-range-ratio {text}: must be a number from 0 to below 1, or {{"input": r, "output": r}}.'
        )
    return pair[0], pair[1]
