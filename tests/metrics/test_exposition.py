"""What /metrics shows: names, types, labels and buckets as recorded, and what traffic changes."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.entrypoints.http_server import HTTPServer, http_config
from tests.entrypoints.known_differences import METRIC_DIFFERENCES

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "http" / "39-metrics.json").read_text())


@pytest.fixture(scope="module")
def server() -> Iterator[HTTPServer]:
    with HTTPServer(http_config(enable_prefix_caching=True)) as running:
        assert running.complete(max_tokens=2).status_code == 200
        yield running


def samples(server: HTTPServer) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = server.client.get("/metrics").text
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def total(server: HTTPServer, name: str, **labels: str) -> float:
    """Sum of a series' samples with these labels."""
    return sum(v for (n, have), v in samples(server).items() if n == name and set(labels.items()) <= have)


def shown(text: str) -> dict[str, dict[str, Any]]:
    """Families by name: type, label names, bucket edges."""
    families: dict[str, dict[str, Any]] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            name, kind = line.split()[2:]
            families[name] = {"name": name, "type": kind, "labels": set(), "buckets": []}
        elif not line.startswith("#"):
            sample = re.split(r"[{ ]", line)[0]
            family = sample if sample in families else sample.rpartition("_")[0]
            labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', line))
            families[family]["labels"] |= set(labels)
            if "le" in labels and labels["le"] not in families[family]["buckets"]:
                families[family]["buckets"].append(labels["le"])
    return families


@pytest.mark.parametrize("recorded", RECORDED, ids=[m["name"] for m in RECORDED])
def test_recorded_families_are_there(server: HTTPServer, recorded: dict[str, Any]):
    ours = shown(server.client.get("/metrics").text).get(recorded["name"])
    if recorded["name"] in METRIC_DIFFERENCES:
        labels = METRIC_DIFFERENCES[recorded["name"]].labels
        assert (ours is None) == (labels is None)
        if ours is not None and labels is not None:
            assert set(labels) <= ours["labels"]
            assert ours["labels"] != set(recorded["labels"]), "this difference is gone: take it out of the list"
        return
    assert ours is not None
    assert (ours["type"], sorted(ours["labels"])) == (recorded["type"], recorded["labels"])
    assert ours["buckets"] == recorded.get("buckets", [])


def test_our_series_come_in_the_recorded_order(server: HTTPServer):
    ours = [n for n in shown(server.client.get("/metrics").text) if n.startswith("vllm:")]
    missing = {name for name, difference in METRIC_DIFFERENCES.items() if difference.labels is None}
    assert ours == [m["name"] for m in RECORDED if m["name"].startswith("vllm:") and m["name"] not in missing]


def test_format(server: HTTPServer):
    answer = server.client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert answer.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
    assert server.client.get("/metrics/").text.startswith("# HELP python_gc")
    assert server.client.get("/metrics/below").status_code == 200
    assert server.client.head("/metrics").status_code == 200


def test_a_finished_request_is_counted_once(server: HTTPServer):
    names = {
        "vllm:prompt_tokens_total": 3, "vllm:generation_tokens_total": 4, "vllm:request_params_n_count": 1,
        "vllm:request_prompt_tokens_sum": 3, "vllm:request_generation_tokens_sum": 4,
        "vllm:request_params_max_tokens_sum": 4, "vllm:time_to_first_token_seconds_count": 1,
        "vllm:inter_token_latency_seconds_count": 3, "vllm:e2e_request_latency_seconds_count": 1,
        "vllm:request_queue_time_seconds_count": 1, "vllm:iteration_tokens_total_sum": 7,
        "vllm:request_max_num_generation_tokens_sum": 4,
    }  # fmt: skip
    before = {name: total(server, name) for name in names}
    done = total(server, "vllm:request_success_total", finished_reason="length")
    assert server.complete(prompt=[5, 6, 7], max_tokens=4).status_code == 200
    assert {name: total(server, name) - before[name] for name in names} == names
    assert total(server, "vllm:request_success_total", finished_reason="length") == done + 1


def test_choices_count_as_sequences_but_as_one_request(server: HTTPServer):
    before = [total(server, n) for n in ("vllm:request_success_total", "vllm:request_params_n_count")]
    assert server.complete(temperature=1, n=3, max_tokens=1).status_code == 200
    after = [total(server, n) for n in ("vllm:request_success_total", "vllm:request_params_n_count")]
    assert [b - a for a, b in zip(before, after, strict=True)] == [3, 1]


def test_prefix_cache_hits_show_by_source(server: HTTPServer):
    prompt = list(range(1000, 1040))
    for _ in range(2):
        assert server.complete(prompt=prompt, max_tokens=1).status_code == 200
    assert total(server, "vllm:prefix_cache_hits_total") == 32
    assert total(server, "vllm:prompt_tokens_cached_total") == 32
    assert total(server, "vllm:prompt_tokens_by_source_total", source="local_cache_hit") == 32
    assert total(server, "vllm:prompt_tokens_by_source_total") == total(server, "vllm:prompt_tokens_total")


def test_http_series_have_routes_as_handlers(server: HTTPServer):
    assert server.client.get("/v1/nope/123").status_code == 404
    assert server.client.get("/health").status_code == 200
    labels = {"handler": "/v1/completions", "method": "POST", "status": "2xx"}
    assert total(server, "http_requests_total", **labels) >= 1
    assert total(server, "http_requests_total", handler="none", method="GET", status="4xx") >= 1
    assert total(server, "http_requests_total", handler="/health") == 0
    assert total(server, "http_requests_total", handler="/metrics") == 0
    assert total(server, "http_request_size_bytes_sum", handler="/v1/completions") > 0


def test_facts_about_the_cache(server: HTTPServer):
    (labels,) = (dict(labels) for (name, labels) in samples(server) if name == "vllm:cache_config_info")
    assert labels["block_size"] == "16"
    assert labels["num_gpu_blocks"] == "1024"
    assert labels["kv_cache_max_concurrency"] == "7.99"
    assert labels["engine"] == "0"
