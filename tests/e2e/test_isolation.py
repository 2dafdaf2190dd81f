"""Hostile requests among good ones: each gets its 4xx, each good one its right answer, the engine lives on."""

import asyncio
from typing import Any

import httpx

from tests.e2e.server import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
GOOD = {"model": "toy", "prompt": "The quick brown fox", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
HI = [{"role": "user", "content": "Hi"}]


def _completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"model": "toy", "prompt": "Hi", "max_tokens": 4, **fields}


def _chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": "toy", "messages": HI, "max_tokens": 4, **fields}


HOSTILE: list[tuple[str, Any]] = [
    _completion(prompt=[49152]),
    _completion(prompt=[2**31]),
    _completion(prompt=[2**63]),
    _completion(prompt=[-1]),
    _completion(prompt=[[1, 2], [99999999]]),
    _completion(prompt=[]),
    _completion(prompt=[[]]),
    _completion(prompt=""),
    _completion(prompt=None),
    _completion(prompt={"a": 1}),
    _completion(prompt=["a", 1]),
    _completion(prompt=[1] * 2049),
    _completion(prompt=[1] * 2048),
    _completion(prompt="word " * 5000),
    _completion(prompt="x" * 2_000_000),
    _completion(max_tokens=0),
    _completion(max_tokens=-5),
    _completion(max_tokens=2049),
    _completion(max_tokens=10**18),
    _completion(max_tokens=1.5),
    _completion(n=0),
    _completion(n=100_000),
    _completion(n=10**12),
    _completion(n=2, temperature=0),
    _completion(temperature=-0.1),
    _completion(temperature=2.5),
    _completion(temperature="hot"),
    _completion(top_p=0),
    _completion(top_p=1.01),
    _completion(top_k=-7),
    _completion(min_p=1.5),
    _completion(presence_penalty=9),
    _completion(frequency_penalty=-9),
    _completion(repetition_penalty=0),
    _completion(logprobs=21),
    _completion(logprobs=-2),
    _completion(prompt_logprobs=1000),
    _completion(seed=2**64),
    _completion(stop=[""]),
    _completion(stop=["a"] * 5),
    _completion(stop_token_ids=[49152]),
    _completion(stop_token_ids=["a"]),
    _completion(logit_bias={"99999": 1}),
    _completion(logit_bias={"x": 1}),
    _completion(allowed_token_ids=[]),
    _completion(allowed_token_ids=[60000]),
    _completion(bad_words=[""]),
    _completion(min_tokens=5),
    _completion(cache_salt="a/b"),
    _completion(truncate_prompt_tokens=-2),
    _completion(model="another"),
    _completion(stream_options={"include_usage": True}),
    _chat(messages=[]),
    _chat(messages="Hi"),
    _chat(messages=[{"content": "Hi"}]),
    _chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]),
    _chat(messages=[{"role": "user", "content": [{"type": "what"}]}]),
    _chat(chat_template="{% for i in range(10**9) %}{{ i }}{% endfor %}"),
    _chat(chat_template_kwargs={"chat_template": "{{ 1 }}"}),
    _chat(top_logprobs=5),
    _chat(logprobs=True, top_logprobs=1000),
    _chat(messages=[{"role": "user", "content": "word " * 5000}]),
    (COMPLETIONS, b"{"),
    (COMPLETIONS, b""),
    (COMPLETIONS, b"[1, 2]"),
    (COMPLETIONS, b"\xff\xfe{}"),
    (COMPLETIONS, b"[" * 100_000),
    (CHAT, b'{"model": "toy", "messages": [}'),
]


async def _post(client: httpx.AsyncClient, path: str, body: Any) -> httpx.Response:
    if isinstance(body, bytes):
        return await client.post(path, content=body, headers={"content-type": "application/json"})
    return await client.post(path, json=body)


async def _mixed(url: str, good: list[dict[str, Any]]) -> tuple[list[httpx.Response], list[httpx.Response]]:
    limits = httpx.Limits(max_connections=16)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        tasks = []
        for (path, body), request in zip(HOSTILE, good, strict=True):
            tasks += [_post(client, path, body), _post(client, COMPLETIONS, request)]
        replies = await asyncio.gather(*tasks)
    return replies[::2], replies[1::2]


def test_hostile_requests_harm_nobody(toy: Server) -> None:
    engine = toy.engine().pid
    good = [{**GOOD, "prompt": f"The quick brown fox {i}"} for i in range(len(HOSTILE))]
    expected = [httpx.post(toy.url + COMPLETIONS, json=g, timeout=60).json()["choices"][0]["text"] for g in good]
    bad_replies, good_replies = asyncio.run(_mixed(toy.url, good))
    statuses = [r.status_code for r in bad_replies]
    wrong = [(str(HOSTILE[i][1])[:80], s) for i, s in enumerate(statuses) if not 400 <= s < 500]
    assert not wrong
    assert all("error" in r.json() or "detail" in r.json() for r in bad_replies)
    assert [r.json()["choices"][0]["text"] for r in good_replies] == expected
    assert toy.engine().pid == engine
    assert toy.metric("vllm:num_requests_running") == 0
    assert toy.metric("vllm:kv_cache_usage_perc") == 0
