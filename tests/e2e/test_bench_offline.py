"""`vllm bench latency` and `bench startup`: the lines and keys that scripts for vLLM's look for."""

import json
import re
import subprocess
import sys
from pathlib import Path

PERCENTILES = ["10", "25", "50", "75", "90", "99"]
ENGINE = ("--max-model-len", "256", "--kv-cache-memory-bytes", "16M")


def bench(kind: str, model: Path, *args: str) -> "subprocess.CompletedProcess[str]":
    words = [sys.executable, "-m", "vllm_clone.entrypoints.cli.main", "bench", kind, "--model", str(model)]
    return subprocess.run([*words, *ENGINE, *args], capture_output=True, text=True, timeout=120)


def test_latency(toy_model, tmp_path):
    kept = tmp_path / "latency.json"
    done = bench(
        "latency", toy_model, "--input-len", "16", "--output-len", "8", "--batch-size", "2", "--num-iters-warmup", "1",
        "--num-iters", "4", "--output-json", str(kept),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = done.stdout[done.stdout.index("Warming up...") :].splitlines()
    assert re.fullmatch(r"Avg latency: \d\.\d+(e-\d+)? seconds", text[1])
    assert [line.split("%")[0] for line in text[2:]] == PERCENTILES
    assert all(re.fullmatch(r"\d+% percentile latency: \d\.\d+(e-\d+)? seconds", line) for line in text[2:])
    figures = json.loads(kept.read_text())
    assert list(figures) == ["model_id", "avg_latency", "latencies", "percentiles"]
    assert figures["model_id"] == str(toy_model)
    assert list(figures["percentiles"]) == PERCENTILES
    assert len(figures["latencies"]) == 4
    assert 0 < min(figures["latencies"]) <= figures["avg_latency"] <= max(figures["latencies"])


def test_latency_refuses_what_cannot_run(toy_model):
    for args, message in (
        (("--input-len", "250"), "--input-len 250 --output-len 128: together more than --max-model-len (256)"),
        (("--use-beam-search",), "beam search is not implemented yet"),
        (("--batch-size", "0"), "--batch-size 0: must be at least 1"),
        (("--profile",), "--profile: say what to record and where with --profiler-config"),
        (("--cudagraph-metrics",), "--cudagraph-metrics: shows in a server's statistics"),
    ):
        done = bench("latency", toy_model, *args)
        assert done.returncode == 2
        assert message in done.stderr.splitlines()[-1]
        assert "Traceback" not in done.stderr


def test_startup(toy_model, tmp_path):
    kept = tmp_path / "startup.json"
    done = bench(
        "startup", toy_model, "--num-iters-cold", "1", "--num-iters-warmup", "0", "--num-iters-warm", "2",
        "--output-json", str(kept),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = done.stdout
    for part in ("STARTUP TIME BENCHMARK RESULTS", "COLD STARTUP:", "WARM STARTUP:"):
        assert text.count(part) == 1
    assert len(re.findall(r"^Avg startup time: \d+\.\d\d seconds$", text, re.M)) == 2
    assert len(re.findall(r"^  \d+%: \d+\.\d\d seconds$", text, re.M)) == 4 * len(PERCENTILES)
    figures = json.loads(kept.read_text())
    assert list(figures) == [
        f"{a}{kind}_{what}_{b}"
        for kind in ("cold", "warm")
        for what in ("startup", "compilation")
        for a, b in (("avg_", "time"), ("", "times"), ("", "percentiles"))
    ]
    assert len(figures["warm_startup_times"]) == 2
    assert min(figures["warm_startup_times"]) > 0


def test_a_start_that_fails_is_one_line(tmp_path):
    done = bench("startup", tmp_path / "nothing")
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
