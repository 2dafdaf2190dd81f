"""The run itself: requests leave when they are due, probes beside them, and a bar shows how far it is."""

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from tqdm import tqdm

from vllm_clone.benchmarks.serve.arrivals import Arrivals
from vllm_clone.benchmarks.serve.client import Sender
from vllm_clone.benchmarks.serve.sample import Outcome, Sample

BAR_SECONDS = 0.5
"""Between two looks at the rate of tokens."""


@dataclass
class Load:
    """What came of a run: outcomes in the order of the samples, and how busy this process was.

    Attributes:
        duration: seconds from before the first gap to the last answer.
        client_share: CPU seconds of this process per second of the run; 1 is one core.
        rate_changes: (whole requests per second reached by a ramp-up, ISO time).
    """

    outcomes: list[Outcome]
    probes: list[Outcome]
    duration: float
    client_share: float
    rate_changes: list[tuple[int, str]] = field(default_factory=list)


class Driver:
    """Sends samples.

    Args:
        model: name in requests.
        max_concurrency: most requests in flight.
        bar: show progress on stderr.
    """

    def __init__(self, sender: Sender, model: str, max_concurrency: int | None, bar: bool) -> None:
        self._sender = sender
        self._model = model
        self._max_concurrency = max_concurrency
        self._has_bar = bar

    async def warm_up(self, sample: Sample, count: int) -> None:
        """Send a sample several times at once; what comes of it does not matter."""
        gate = asyncio.Semaphore(self._max_concurrency or count)

        async def one() -> None:
            async with gate:
                await self._sender.send(sample, self._model)

        await asyncio.gather(*(one() for _ in range(count)))

    async def until_ready(self, sample: Sample, seconds: float, pause: float = 1.0) -> str:
        """Try a sample until it succeeds; '' then, else why the last try failed."""
        deadline = time.monotonic() + seconds
        while True:
            outcome = await self._sender.send(sample, self._model)
            if outcome.success:
                return ""
            if time.monotonic() + pause > deadline:
                return outcome.error
            await asyncio.sleep(pause)

    async def run(
        self,
        samples: Sequence[Sample],
        arrivals: Arrivals,
        *,
        models: Sequence[str] = (),
        id_prefix: str | None = None,
        probe_rate: float = 0.0,
        follow_rates: bool = False,
    ) -> Load:
        """Send every sample when it is due.

        Args:
            models: model of each sample; the driver's own for all when empty.
            id_prefix: request ids are this and the sample's number.
            probe_rate: one-token requests per second beside them.
            follow_rates: note when the rate reaches another whole number.
        """
        bar = tqdm(total=len(samples), disable=not self._has_bar, file=sys.stderr)
        watch = asyncio.create_task(self._watch(bar))
        gate = asyncio.Semaphore(self._max_concurrency) if self._max_concurrency else None
        changes: list[tuple[int, str]] = []
        self._sender.counter.tokens = 0
        cpu, begun = time.process_time(), time.perf_counter()
        stop = asyncio.Event()
        probes = asyncio.create_task(self._probe(samples[0], probe_rate, stop)) if probe_rate else None
        tasks = []
        for i, sample in enumerate(samples):
            late = begun + arrivals.due[i] - time.perf_counter()
            if late > 0:
                await asyncio.sleep(late)
            if follow_rates and (not changes or int(arrivals.rates[i]) > changes[-1][0]):
                changes.append((int(arrivals.rates[i]), datetime.now().isoformat()))
            request_id = None if id_prefix is None else f"{id_prefix}{i}"
            model = models[i] if models else self._model
            tasks.append(asyncio.create_task(self._one(sample, model, request_id, gate, bar)))
        outcomes = await asyncio.gather(*tasks)
        stop.set()
        probed = await probes if probes is not None else []
        duration = time.perf_counter() - begun
        share = (time.process_time() - cpu) / duration
        watch.cancel()
        bar.close()
        return Load(list(outcomes), probed, duration, share, changes)

    async def _one(
        self, sample: Sample, model: str, request_id: str | None, gate: asyncio.Semaphore | None, bar: "tqdm[None]"
    ) -> Outcome:
        due = time.perf_counter()
        if gate is None:
            outcome = await self._sender.send(sample, model, request_id)
        else:
            async with gate:
                outcome = await self._sender.send(sample, model, request_id)
        outcome.queue_time = outcome.start - due
        bar.update(1)
        return outcome

    async def _probe(self, sample: Sample, rate: float, stop: asyncio.Event) -> list[Outcome]:
        """One-token requests, one after the other, at most so many per second, until the run ends."""
        probe = replace(sample, output_len=1)
        outcomes = []
        while not stop.is_set():
            outcomes.append(await self._sender.send(probe, self._model))
            try:
                await asyncio.wait_for(stop.wait(), 1 / rate)
            except TimeoutError:
                continue
        return outcomes

    async def _watch(self, bar: "tqdm[None]") -> None:
        """Keep the rate of arriving tokens beside the bar."""
        if bar.disable:
            return
        counter, before, then = self._sender.counter, 0, time.monotonic()
        while True:
            await asyncio.sleep(BAR_SECONDS)
            now = time.monotonic()
            bar.set_postfix_str(f"{(counter.tokens - before) / (now - then):.0f} tok/s")
            before, then = counter.tokens, now


def assign(names: Sequence[str], count: int, strategy: str, seed: int) -> list[str]:
    """A name for each of ``count`` requests, in turn or at random."""
    if strategy == "round-robin":
        return [names[i % len(names)] for i in range(count)]
    return random.Random(seed).choices(names, k=count)
