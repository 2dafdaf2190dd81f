"""What else a run asks the server: its models, its tokenizer, its counters, its profiler."""

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_clone.benchmarks.serve.http import Client, HTTPError
from vllm_clone.benchmarks.serve.metrics import Speculation
from vllm_clone.benchmarks.serve.sample import Sample

ALIGN_AT_ONCE = 64
"""Prompts that are measured by the server at the same time."""


class ServerError(ConnectionError):
    """The server did not answer as it must; the message says what to check."""


async def first_model(client: Client) -> tuple[str, str]:
    """(name for requests, path or id of the weights) of the server's first model."""
    try:
        status, body = await client.fetch("GET", "/v1/models")
        card = msgspec.json.decode(body)["data"][0] if status == 200 else {}
        return card["id"], card.get("root") or card["id"]
    except (HTTPError, msgspec.DecodeError, LookupError, TypeError) as error:
        reason = error if isinstance(error, HTTPError) else "it does not list its models"
        raise ServerError(
            f"no model from {client.base_url}/v1/models ({reason}); is the server running there? Or give --model."
        ) from error


async def _server_ids(client: Client, model: str, prompt: str, special: bool = True) -> list[int] | None:
    """A prompt's ids by the server's tokenizer; None when it does not tell."""
    answer = await _post(client, "/tokenize", {"model": model, "prompt": prompt, "add_special_tokens": special})
    ids = answer.get("tokens") if answer else None
    return ids if isinstance(ids, list) else None


async def align(client: Client, model: str, samples: Sequence[Sample]) -> str | None:
    """Cut prompts that the server finds longer than they should be; a line about it when something was off."""
    first = await _server_ids(client, model, str(samples[0].prompt))
    if first is None:
        return "WARNING: the server has no /tokenize; prompt lengths are those of the local tokenizer."
    if len(first) == samples[0].prompt_len:
        return None
    gate = asyncio.Semaphore(ALIGN_AT_ONCE)

    async def cut(sample: Sample) -> bool:
        async with gate:
            ids = await _server_ids(client, model, str(sample.prompt))
            excess = len(ids or ()) - sample.prompt_len
            bare = await _server_ids(client, model, str(sample.prompt), special=False) if excess > 0 else None
            if bare is None:
                return False
            answer = await _post(client, "/detokenize", {"model": model, "tokens": bare[: len(bare) - excess]})
            if answer is None or not isinstance(answer.get("prompt"), str):
                return False
            sample.prompt = answer["prompt"]
            return True

    changed = sum(await asyncio.gather(*(cut(s) for s in samples)))
    return (
        f"WARNING: the server counts {len(first)} tokens where the local tokenizer counts {samples[0].prompt_len}; "
        f"{changed} prompts were cut."
    )


async def profiler(client: Client, action: str) -> str | None:
    """POST /start_profile or /stop_profile; a line about it when it did not work."""
    try:
        status, _ = await client.fetch("POST", f"/{action}_profile")
    except HTTPError as error:
        return f"WARNING: /{action}_profile: {error}"
    return None if status == 200 else f"WARNING: the server refused /{action}_profile with status {status}."


Counters = dict[str, float]
_SAMPLE = re.compile(r"^(vllm:spec_decode_[a-z_]+?)(?:_total)?(?:\{([^}]*)\})? ([0-9.eE+-]+)$", re.M)
_POSITION = re.compile(r'position="(\d+)"')


async def speculation_counters(client: Client) -> Counters:
    """The server's counters of speculative decoding, by name and position; empty without any."""
    try:
        status, body = await client.fetch("GET", "/metrics")
    except HTTPError:
        return {}
    found: Counters = {}
    for name, labels, value in _SAMPLE.findall(body.decode(errors="replace")) if status == 200 else ():
        position = _POSITION.search(labels)
        key = name.removeprefix("vllm:spec_decode_") + (f":{position[1]}" if position else "")
        found[key] = found.get(key, 0.0) + float(value)
    return found


def speculation(before: Counters, after: Counters) -> Speculation | None:
    """What moved between two readings; None when nothing was drafted."""
    moved = {key: value - before.get(key, 0.0) for key, value in after.items()}
    drafts = int(moved.get("num_drafts", 0))
    if drafts <= 0:
        return None
    prefix = "num_accepted_tokens_per_pos:"
    positions = sorted((int(key.removeprefix(prefix)), value) for key, value in moved.items() if key.startswith(prefix))
    return Speculation(
        drafts,
        int(moved.get("num_draft_tokens", 0)),
        int(moved.get("num_accepted_tokens", 0)),
        [value / drafts for _, value in positions],
    )


async def _post(client: Client, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
    try:
        status, answer = await client.fetch("POST", path, msgspec.json.encode(body))
        found = msgspec.json.decode(answer) if status == 200 else None
    except (HTTPError, msgspec.DecodeError):
        return None
    return found if isinstance(found, dict) else None
