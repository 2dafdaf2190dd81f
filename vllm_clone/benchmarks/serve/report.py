"""The summary on the terminal and the result file, in the layout that scripts for vLLM's expect."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_clone.benchmarks.serve.metrics import LATENCIES, Figures
from vllm_clone.benchmarks.serve.options import Options
from vllm_clone.benchmarks.serve.sample import Outcome

WIDTH = 50
TITLE = " Serving Benchmark Result "


def summary(figures: Figures, options: Options) -> str:
    """The block of rows that is printed after a run."""
    lines = [TITLE.center(WIDTH, "=")]
    lines += [
        f"{label:<40} {_shown(value):<10}" if value is not None else label for label, value in _rows(figures, options)
    ]
    return "\n".join([*lines, "=" * WIDTH])


def _shown(value: float | int) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _rows(f: Figures, options: Options) -> Iterator[tuple[str, float | int | None]]:
    """(label, value) of each row; a block's title has no value."""
    generates, counts_tokens = options.backend.generates, options.has_tokenizer
    yield "Successful requests:", f.completed
    yield "Failed requests:", f.failed
    if options.max_concurrency is not None:
        yield "Maximum request concurrency:", options.max_concurrency
    if options.request_rate != float("inf"):
        yield "Request rate configured (RPS):", options.request_rate
    yield "Benchmark duration (s):", f.duration
    yield "Total input tokens:", f.input_tokens
    if generates and counts_tokens:
        yield "Total generated tokens:", f.output_tokens
    yield "Request throughput (req/s):", f.per_second(f.completed)
    if not generates:
        yield "Input throughput (inputs/s):", f.per_second(f.completed)
    if f.goodput is not None and generates:
        yield "Request goodput (req/s):", f.goodput
    if generates and counts_tokens:
        yield "Output token throughput (tok/s):", f.per_second(f.output_tokens)
        yield "Peak output token throughput (tok/s):", f.peak_output_rate
    if generates:
        yield "Peak concurrent requests:", float(f.peak_concurrency)
    if counts_tokens:
        yield "Total token throughput (tok/s):", f.per_second(f.input_tokens + f.output_tokens)
    yield from _probe_rows(f)
    yield from _latency_rows(f, options)
    yield from _speculation_rows(f)


def _probe_rows(f: Figures) -> Iterator[tuple[str, float | int | None]]:
    if f.probes is not None:
        yield "Probe Requests".center(WIDTH, "-"), None
        yield "Probe requests completed:", f.probes.completed
        yield "Probe requests failed:", f.probes.failed
        yield "Median probe E2EL (ms):", f.probes.median
        yield "P99 probe E2EL (ms):", f.probes.p99
        yield "Max probe E2EL (ms):", f.probes.max


def _latency_rows(f: Figures, options: Options) -> Iterator[tuple[str, float | int | None]]:
    for name, spread in f.spreads.items():
        if name in ("ttft", "tpot", "itl") and not (options.backend.generates and options.has_tokenizer):
            continue
        if name == "client_queue_time" and options.max_concurrency is None:
            continue
        if name == "e2el_including_client_queue" and (
            options.max_concurrency is None or options.request_rate == float("inf")
        ):
            continue
        title, short = LATENCIES[name]
        yield title.center(WIDTH, "-"), None
        yield f"Mean {short} (ms):", spread.mean
        yield f"Median {short} (ms):", spread.median
        for percentile, value in spread.percentiles:
            yield f"P{_number(percentile)} {short} (ms):", value


def _speculation_rows(f: Figures) -> Iterator[tuple[str, float | int | None]]:
    s = f.speculation
    if s is not None:
        yield "Speculative Decoding".center(WIDTH, "-"), None
        yield "Acceptance rate (%):", s.acceptance_rate
        yield "Acceptance length:", s.acceptance_length
        yield "Drafts:", s.drafts
        yield "Draft tokens:", s.draft_tokens
        yield "Accepted tokens:", s.accepted_tokens
        if s.accepted_at:
            yield "Per-position acceptance (%):", None
        for i, share in enumerate(s.accepted_at):
            yield f"  Position {i}:", share * 100


def _number(percentile: float) -> str:
    return str(int(percentile)) if percentile == int(percentile) else str(percentile)


def result(figures: Figures, outcomes: list[Outcome], options: Options, date: str) -> dict[str, Any]:
    """The result as saved, in the order of vLLM's keys. Times in lists are seconds, ``*_ms`` milliseconds."""
    f = figures
    found: dict[str, Any] = {
        "date": date,
        "endpoint_type": options.backend_name,
        "backend": options.backend_name,
        "label": options.label,
        "model_id": options.model,
        "tokenizer_id": options.tokenizer,
        "num_prompts": options.num_prompts,
        **options.metadata,
        "request_rate": options.request_rate if options.request_rate != float("inf") else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }
    if options.ramp_up is not None:
        found["ramp_up_strategy"] = options.ramp_up.strategy
        found["ramp_up_start_rps"] = options.ramp_up.start
        found["ramp_up_end_rps"] = options.ramp_up.end
    found |= (_generation if options.backend.generates else _pooling)(f, outcomes, options.save_detailed)
    if f.probes is not None:
        found["probe_completed"], found["probe_failed"] = f.probes.completed, f.probes.failed
        found["probe_median_e2el_ms"], found["probe_p99_e2el_ms"] = f.probes.median, f.probes.p99
        found["probe_max_e2el_ms"] = f.probes.max
    if f.rate_changes:
        found["rps_change_events"] = [{"rps": rps, "timestamp": when} for rps, when in f.rate_changes]
    if f.speculation is not None:
        found["spec_decode_acceptance_rate"] = f.speculation.acceptance_rate
        found["spec_decode_acceptance_length"] = f.speculation.acceptance_length
        found["spec_decode_num_drafts"] = f.speculation.drafts
        found["spec_decode_draft_tokens"] = f.speculation.draft_tokens
        found["spec_decode_accepted_tokens"] = f.speculation.accepted_tokens
        found["spec_decode_per_position_acceptance_rates"] = f.speculation.accepted_at
    for name, spread in f.spreads.items():
        found[f"mean_{name}_ms"] = spread.mean
        found[f"median_{name}_ms"] = spread.median
        found[f"std_{name}_ms"] = spread.std
        found |= {f"p{_number(p)}_{name}_ms": value for p, value in spread.percentiles}
    return found


def _generation(f: Figures, outcomes: list[Outcome], detailed: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "duration": f.duration,
        "completed": f.completed,
        "failed": f.failed,
        "total_input_tokens": f.input_tokens,
        "total_output_tokens": f.output_tokens,
        "request_throughput": f.per_second(f.completed),
        "request_goodput": f.goodput,
        "output_throughput": f.per_second(f.output_tokens),
        "total_token_throughput": f.per_second(f.input_tokens + f.output_tokens),
        "input_lens": [o.prompt_len for o in outcomes],
        "output_lens": [o.output_len for o in outcomes],
        "ttfts": [o.ttft for o in outcomes],
        "itls": [o.gaps for o in outcomes],
        "latencies": [o.latency for o in outcomes],
        "start_times": [o.start for o in outcomes],
        "queue_times": [o.queue_time for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
        "errors": [o.error for o in outcomes],
        "max_output_tokens_per_s": f.peak_output_rate,
        "max_concurrent_requests": f.peak_concurrency,
        "rtfx": 0.0,
    }
    return found if detailed else {k: v for k, v in found.items() if k not in DETAILS}


def _pooling(f: Figures, outcomes: list[Outcome], detailed: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "duration": f.duration,
        "completed": f.completed,
        "total_input_tokens": f.input_tokens,
        "total_input_sequences": f.completed,
        "request_throughput": f.per_second(f.completed),
        "input_sequence_throughput": f.per_second(f.completed),
        "total_token_throughput": f.per_second(f.input_tokens),
        "input_lens": [o.prompt_len for o in outcomes],
        "latencies": [o.latency for o in outcomes],
        "queue_times": [o.queue_time for o in outcomes],
        "errors": [o.error for o in outcomes],
    }
    return found if detailed else {k: v for k, v in found.items() if k not in DETAILS}


DETAILS = frozenset(["input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"])
"""Lists with an entry per request that are only saved when asked for."""


def file_name(options: Options, date: str) -> str:
    """Name of the result file when none is given."""
    label = options.label or options.backend_name
    cap = f"-concurrency{options.max_concurrency}" if options.max_concurrency is not None else ""
    model = options.model.rstrip("/").split("/")[-1]
    if options.ramp_up is not None:
        r = options.ramp_up
        return f"{label}-ramp-up-{r.strategy}-{r.start}qps-{r.end}qps{cap}-{model}-{date}.json"
    return f"{label}-{options.request_rate}qps{cap}-{model}-{date}.json"


def save(found: dict[str, Any], options: Options) -> Path:
    """Write the result; returns where. An existing file gets a line more with --append-result, else it is replaced."""
    path = Path(options.result_dir or ".") / (options.result_filename or file_name(options, found["date"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found)
    if options.append_result:
        separator = "\n" if path.exists() and path.stat().st_size else ""
        with path.open("a", encoding="utf-8") as file:
            file.write(separator + text)
    else:
        path.write_text(text, encoding="utf-8")
    return path
