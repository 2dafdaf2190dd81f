"""`vllm bench serve`, step by step."""

import asyncio
import resource
import sys
import time
from pathlib import Path
from typing import Any

from vllm_clone.benchmarks.serve import datasets, report, server, timeline
from vllm_clone.benchmarks.serve.arrivals import Arrivals, schedule
from vllm_clone.benchmarks.serve.client import Sender
from vllm_clone.benchmarks.serve.http import Client
from vllm_clone.benchmarks.serve.load import Driver, Load, assign
from vllm_clone.benchmarks.serve.metrics import Figures, Probes, figures_of
from vllm_clone.benchmarks.serve.options import Options, thresholds
from vllm_clone.benchmarks.serve.sample import Sample
from vllm_clone.hub.files import resolve_tokenizer
from vllm_clone.tokenizers import Tokenizer, get_tokenizer

BUSY_SHARE = 0.8
"""Of one core, above which this client may be what limits the run: it has one event loop."""
MAX_ERRORS_SHOWN = 10
SPARE_FILES = 64


async def run(options: Options) -> None:
    """Run the benchmark and report it; requests that fail are part of the report.

    Raises:
        ConfigError: the data set or the tokenizer cannot be used.
        ServerError: the server does not answer.
    """
    client = Client(options.base_url, options.headers, options.flags["insecure"])
    try:
        await _run(options, client)
    finally:
        client.close()


async def _run(options: Options, client: Client) -> None:
    if not options.model:
        print("No --model; asking the server for its first one...")
        name, root = await server.first_model(client)
        print(f"First model name: {name}, first model id: {root}")
        options.model, options.model_name = root, options.model_name or name
        options.tokenizer = options.tokenizer or root
    tokenizer = _tokenizer(options)
    samples = _samples(options, tokenizer)
    if options.flags["dataset_name"] in ("random", "prefix_repetition"):
        _say(await server.align(client, options.model_name, samples))
    if options.backend.takes_sampling and "temperature" not in options.extra_body:
        print("WARNING: no --temperature; the server's default applies. --temperature 0 asks for greedy decoding.")
    sender = Sender(
        client,
        options.backend,
        options.endpoint,
        extra_body=options.extra_body,
        logprobs=options.flags["logprobs"],
        tokenizer=tokenizer,
        keep_texts=options.save_detailed,
    )
    driver = Driver(sender, options.model_name, options.max_concurrency, not options.flags["disable_tqdm"])
    _allow_open_files(len(samples))
    await _prepare(driver, samples[0], options)
    load, figures = await _measure(driver, client, samples, options)
    _report(load, figures, options)


def _tokenizer(options: Options) -> Tokenizer | None:
    if not options.has_tokenizer:
        return None
    path = resolve_tokenizer(options.tokenizer or options.model)
    return get_tokenizer(str(path), options.flags["tokenizer_mode"], options.flags["trust_remote_code"])


def _samples(options: Options, tokenizer: Tokenizer | None) -> list[Sample]:
    """The samples; as many as there are counts from here on."""
    has_template = not options.flags["skip_chat_template"] and not options.backend.is_chat
    samples = datasets.load(
        options.flags["dataset_name"],
        datasets.Request(options.flags, tokenizer, has_template and tokenizer is not None),
    )
    options.num_prompts = len(samples)
    return samples


async def _prepare(driver: Driver, sample: Sample, options: Options) -> None:
    print("Starting initial single prompt test run...")
    patience = options.flags["ready_check_timeout_sec"]
    if patience:
        print(f"Waiting for endpoint to become up in {patience} seconds")
        if reason := await driver.until_ready(sample, patience):
            raise server.ServerError(f"{options.base_url}{options.endpoint} is not ready after {patience} s: {reason}")
        print("Initial test run completed.")
    else:
        print("Skipping endpoint ready check.")
    if warmups := options.flags["num_warmups"]:
        print(f"Warming up with {warmups} requests...")
        await driver.warm_up(sample, warmups)
        print("Warmup run completed.")


async def _measure(driver: Driver, client: Client, samples: list[Sample], options: Options) -> tuple[Load, Figures]:
    print("Starting main benchmark run...")
    seed, adapters = options.flags["seed"], options.flags["lora_modules"]
    models = assign(adapters, len(samples), options.flags["lora_assignment"], seed) if adapters else []
    if options.flags["profile"]:
        print("Starting profiler...")
        _say(await server.profiler(client, "start"))
    _describe_load(options)
    before = await server.speculation_counters(client)
    load = await driver.run(
        samples,
        _arrivals(options, samples),
        models=models,
        id_prefix=options.request_id_prefix,
        probe_rate=options.flags["probe_request_rate"],
        follow_rates=options.ramp_up is not None,
    )
    after = await server.speculation_counters(client)
    if options.flags["profile"]:
        print("Stopping profiler...")
        _say(await server.profiler(client, "stop"))
    figures = figures_of(
        load.outcomes,
        load.duration,
        metrics=options.metrics,
        percentiles=options.percentiles,
        goodput=options.goodput,
    )
    figures.probes = Probes.of(load.probes)
    figures.speculation = server.speculation(before, after)
    figures.rate_changes = load.rate_changes
    return load, figures


def _arrivals(options: Options, samples: list[Sample]) -> Arrivals:
    if options.self_timed:
        return Arrivals([s.timestamp or 0.0 for s in samples], [])
    return schedule(len(samples), options.request_rate, options.burstiness, options.ramp_up, options.flags["seed"])


def _describe_load(options: Options) -> None:
    if options.self_timed:
        print("Requests leave at the times of the trace.")
        return
    if options.ramp_up is not None:
        ramp = options.ramp_up
        print(f"Traffic ramp-up strategy: {ramp.strategy}.")
        print(f"Will increase RPS from {ramp.start} to {ramp.end} RPS over the duration of the benchmark.")
    else:
        print(f"Traffic request rate: {options.request_rate}")
    kind = "Poisson process" if options.burstiness == 1.0 else "Gamma distribution"
    print(f"Burstiness factor: {options.burstiness} ({kind})")
    print(f"Maximum request concurrency: {options.max_concurrency}")
    if rate := options.flags["probe_request_rate"]:
        print(f"Probe request rate: {rate} req/s")


def _report(load: Load, figures: Figures, options: Options) -> None:
    errors = [o.error for o in load.outcomes if not o.success]
    if errors:
        print(f"{len(errors)} of {len(load.outcomes)} requests failed; the first of them:")
        for i, error in enumerate(errors[:MAX_ERRORS_SHOWN]):
            print(f"Error {i}: {error}")
    print(report.summary(figures, options))
    if not figures.completed:
        _say("WARNING: every request failed, so the figures say nothing; look at the errors above.")
    if load.client_share > BUSY_SHARE:
        _say(
            f"WARNING: this client took {load.client_share:.0%} of a core, so it may be what limits these figures; "
            "run it on another machine, or several of them."
        )
    if options.saves:
        date = time.strftime("%Y%m%d-%H%M%S")
        found = report.result(figures, load.outcomes, options, date)
        path = report.save(found, options)
        if options.flags["plot_timeline"]:
            _plot(path, load, options)


def _plot(path: Path, load: Load, options: Options) -> None:
    target = path.with_suffix(".timeline.html")
    limits = thresholds(options.flags["timeline_itl_thresholds"])
    target.write_text(timeline.page(load.outcomes, limits), encoding="utf-8")
    print(f"Timeline plot saved to: {target}")


def _say(line: str | None) -> None:
    """A remark that is not part of the output that scripts read."""
    if line:
        sys.stdout.flush()
        print(line, file=sys.stderr)


def _allow_open_files(connections: int) -> None:
    """Raise the limit of open files, as far as we may, to one connection per request."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + SPARE_FILES
    if soft not in (resource.RLIM_INFINITY,) and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def runner() -> asyncio.Runner:
    """A runner on the fastest event loop there is: on the machine under test, the client's time is the server's."""
    factory: Any = None
    try:
        import uvloop

        factory = uvloop.new_event_loop
    except ImportError:
        factory = asyncio.new_event_loop
    return asyncio.Runner(loop_factory=factory)


def main(options: Options) -> None:
    """:func:`run` on an event loop of its own. Errors as there."""
    with runner() as loop:
        loop.run(run(options))
