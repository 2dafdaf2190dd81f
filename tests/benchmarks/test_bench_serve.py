"""`vllm bench serve` against a server: what is sent, printed and saved, and how mistakes end."""

import json
import re
from pathlib import Path

import pytest

SMALL = ("--num-prompts", "3", "--random-input-len", "8", "--random-output-len", "4")
LATENCY_ROWS = [
    f"{kind} {name} (ms):" for name in ("TTFT", "TPOT", "ITL") for kind in ("Mean", "Median", "P99")
]  # fmt: skip
BASIC_ROWS = [
    "Successful requests:", "Failed requests:", "Benchmark duration (s):", "Total input tokens:",
    "Total generated tokens:", "Request throughput (req/s):", "Output token throughput (tok/s):",
    "Peak output token throughput (tok/s):", "Peak concurrent requests:", "Total token throughput (tok/s):",
]  # fmt: skip
BASIC_KEYS = [
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "latencies",
    "queue_times", "max_output_tokens_per_s", "max_concurrent_requests", "rtfx",
    "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "std_tpot_ms",
    "p99_tpot_ms", "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p99_itl_ms",
]  # fmt: skip


def summary_of(out: str) -> list[str]:
    lines = out.splitlines()
    begin = lines.index("============ Serving Benchmark Result ============")
    return lines[begin + 1 : lines.index("=" * 50)]


def labels(out: str) -> list[str]:
    return [line[:40].rstrip() if not line.startswith("-") else line.strip("-") for line in summary_of(out)]


def saved(bench, tmp_path: Path, *argv: str) -> dict:
    path = tmp_path / "result.json"
    bench(*argv, "--save-result", "--result-dir", str(tmp_path), "--result-filename", path.name)
    return json.loads(path.read_text())


def test_the_summary_has_vllms_rows_in_vllms_layout(bench):
    out, _, code = bench(*SMALL)
    assert code == 0
    titles = ["Time to First Token", "Time per Output Token (excl. 1st token)", "Inter-token Latency"]
    blocks = [row for i, title in enumerate(titles) for row in (title, *LATENCY_ROWS[3 * i : 3 * i + 3])]
    assert labels(out) == BASIC_ROWS + blocks
    rows = summary_of(out)
    assert rows[0] == "Successful requests:                     3         "
    assert "---------------Time to First Token----------------" in rows
    assert "-----Time per Output Token (excl. 1st token)------" in rows
    assert re.fullmatch(r"Peak concurrent requests: {16}\d\.00 {6}", rows[8])


def test_the_saved_result_has_vllms_keys_in_order(bench, tmp_path):
    assert list(saved(bench, tmp_path, *SMALL)) == BASIC_KEYS


def test_every_option_that_adds_rows_adds_them_in_place(bench):
    out, _, _ = bench(
        *SMALL, "--request-rate", "50", "--max-concurrency", "2", "--goodput", "ttft:5000",
        "--probe-request-rate", "99",
        "--metric-percentiles", "25,99.9", "--percentile-metrics",
        "ttft,e2el,client_queue_time,e2el_including_client_queue",
    )  # fmt: skip
    rows = labels(out)
    assert rows[2:4] == ["Maximum request concurrency:", "Request rate configured (RPS):"]
    assert rows[8] == "Request goodput (req/s):"
    probes = ["completed:", "failed:"]
    expected = ["Probe Requests", *(f"Probe requests {p}" for p in probes)]
    expected += [f"{kind} probe E2EL (ms):" for kind in ("Median", "P99", "Max")]
    for title, name in (
        ("Time to First Token", "TTFT"),
        ("End-to-end Latency", "E2EL"),
        ("Client-side Queueing", "Client Queue Time"),
        ("Queue-inclusive End-to-end Latency", "E2EL incl. Client Queue"),
    ):
        expected += [title, *(f"{kind} {name} (ms):" for kind in ("Mean", "Median", "P25", "P99.9"))]
    assert rows[13:] == expected


def test_details_probes_and_ramp_up_have_vllms_keys(bench, tmp_path):
    found = saved(
        bench, tmp_path, *SMALL, "--save-detailed", "--probe-request-rate", "99", "--metadata", "tp=1",
        "--ramp-up-strategy", "linear", "--ramp-up-start-rps", "100", "--ramp-up-end-rps", "200",
        "--percentile-metrics", "e2el", "--label", "mine",
    )  # fmt: skip
    assert list(found) == [
        "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "tp", "request_rate",
        "burstiness", "max_concurrency", "ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps",
        "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
        "request_goodput", "output_throughput", "total_token_throughput", "input_lens", "output_lens", "ttfts", "itls",
        "latencies", "start_times", "queue_times", "generated_texts", "errors", "max_output_tokens_per_s",
        "max_concurrent_requests", "rtfx", "probe_completed", "probe_failed", "probe_median_e2el_ms",
        "probe_p99_e2el_ms", "probe_max_e2el_ms", "rps_change_events", "mean_e2el_ms", "median_e2el_ms", "std_e2el_ms",
        "p99_e2el_ms",
    ]  # fmt: skip
    assert found["request_rate"] == "inf"
    assert found["rps_change_events"][0]["rps"] == 100
    assert found["output_lens"] == [4, 4, 4]
    assert found["input_lens"] == [7, 7, 7]  # the server's count wins
    assert found["generated_texts"] == [" w w w w"] * 3
    assert [len(gaps) for gaps in found["itls"]] == [3, 3, 3]


def test_an_embedding_run_has_its_own_rows_and_keys(bench, tmp_path):
    argv = (*SMALL, "--backend", "openai-embeddings")
    assert labels(bench(*argv)[0]) == [
        "Successful requests:", "Failed requests:", "Benchmark duration (s):", "Total input tokens:",
        "Request throughput (req/s):", "Input throughput (inputs/s):", "Total token throughput (tok/s):",
        "End-to-end Latency", "Mean E2EL (ms):", "Median E2EL (ms):", "P99 E2EL (ms):",
    ]  # fmt: skip
    found = saved(bench, tmp_path, *argv)
    assert list(found)[10:20] == [
        "duration", "completed", "total_input_tokens", "total_input_sequences", "request_throughput",
        "input_sequence_throughput", "total_token_throughput", "latencies", "queue_times", "mean_e2el_ms",
    ]  # fmt: skip
    assert found["total_input_tokens"] == 27


def test_the_name_of_the_result_file_tells_the_run(bench, tmp_path):
    bench(*SMALL, "--save-result", "--result-dir", str(tmp_path / "new"), "--max-concurrency", "2")
    (file,) = (tmp_path / "new").iterdir()
    assert re.fullmatch(r"openai-infqps-concurrency2-tokenizer\d+-\d{8}-\d{6}\.json", file.name)


def test_results_can_be_appended_a_line_each(bench, tmp_path):
    for _ in range(2):
        bench(*SMALL, "--append-result", "--result-dir", str(tmp_path), "--result-filename", "all.json")
    assert [json.loads(line)["completed"] for line in (tmp_path / "all.json").read_text().splitlines()] == [3, 3]


def test_a_completion_is_worded_as_vllm_words_it(bench, server):
    bench(
        *SMALL,
        "--max-concurrency",
        "1",
        "--temperature",
        "0",
        "--extra-body",
        '{"x": 1, "temperature": 0.5}',
        "--request-id-prefix",
        "id-",
    )
    _, body, headers = next(a for a in server.asked if a[0] == "/v1/completions")
    assert {k: v for k, v in body.items() if k != "prompt"} == {
        "model": "served", "repetition_penalty": 1.0, "max_tokens": 4, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True, "temperature": 0.5, "x": 1,
    }  # fmt: skip
    assert headers["x-request-id"] == "id-0"


@pytest.mark.parametrize(
    ("backend", "path", "fields"),
    [
        ("openai-chat", "/v1/chat/completions", {"max_completion_tokens": 4}),
        ("openai-responses", "/v1/responses", {"max_output_tokens": 4, "store": False}),
        ("vllm", "/v1/completions", {"max_tokens": 4}),
        ("llama.cpp", "/v1/completions", {"max_tokens": 4}),
        ("tgi", "/generate_stream", {"parameters": {"max_new_tokens": 4, "details": True}}),
    ],
)
def test_backends(bench, server, tmp_path, backend, path, fields):
    found = saved(bench, tmp_path, *SMALL, "--backend", backend)
    assert (found["completed"], found["total_output_tokens"]) == (3, 12)
    asked = [body for p, body, _ in server.asked if p == path]
    assert len(asked) == 3
    assert fields.items() <= asked[0].items()


def test_headers_and_key_are_sent(bench, server, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    bench(*SMALL, "--header", "x-a=b=c", "User-Agent=me")
    headers = server.asked[-1][2]
    assert (headers["x-a"], headers["User-Agent"], headers["Authorization"]) == ("b=c", "me", "Bearer secret")


def test_output_is_counted_here_when_the_server_does_not_count(bench, server, tmp_path):
    server.reports_usage = False
    assert saved(bench, tmp_path, *SMALL)["total_output_tokens"] == 3 * 8  # " w" is two tokens


def test_failed_requests_are_listed_and_the_exit_code_stays_0_as_vllms_does(bench, server):
    server.failures = [(404, "No such model."), (500, "")]
    out, _, code = bench(*SMALL, "--max-concurrency", "1")
    assert code == 0
    assert "Error 0: Not Found: No such model.\nError 1: Internal Server Error\n" in out
    assert summary_of(out)[:2] == [f"{'Successful requests:':<40} {1:<10}", f"{'Failed requests:':<40} {2:<10}"]


def test_a_run_without_a_success_says_so(bench, server):
    server.statuses["/v1/completions"] = 503
    _, err, code = bench(*SMALL)
    assert code == 0
    assert "every request failed" in err


def test_all_failed_still_gives_a_summary(bench, server, tmp_path):
    server.statuses["/v1/completions"] = 503
    found = saved(bench, tmp_path, *SMALL)
    assert (found["completed"], found["failed"], found["mean_ttft_ms"], found["max_concurrent_requests"]) == (
        0,
        3,
        0,
        0,
    )


def test_warm_ups_and_the_ready_check_come_first_and_do_not_count(bench, server, tmp_path):
    server.failures = [(503, "loading")]
    found = saved(bench, tmp_path, *SMALL, "--num-warmups", "2", "--ready-check-timeout-sec", "9")
    assert found["completed"] == 3
    assert len(server.generations) == 2 + 2 + 3  # two tries, two warm-ups


def test_concurrency_is_capped(bench, server):
    bench("--num-prompts", "12", *SMALL[2:], "--max-concurrency", "2")
    assert server.most_running <= 2


def test_adapters_take_turns_and_warm_ups_use_the_model(bench, server):
    bench(*SMALL, "--lora-modules", "a", "b", "--lora-assignment", "round-robin", "--num-warmups", "1")
    models = [body["model"] for body in server.generations]
    assert models[0] == "served"
    assert sorted(models[1:]) == ["a", "a", "b"]


def test_the_profiler_is_started_and_stopped(bench, server):
    bench(*SMALL, "--profile")
    paths = [path for path, _, _ in server.asked]
    assert paths.index("/start_profile") < paths.index("/v1/completions") < paths.index("/stop_profile")


def test_prompts_that_the_server_finds_too_long_are_cut(bench, server):
    server.extra_tokens = 50
    _, err, _ = bench(*SMALL)
    assert "3 prompts were cut" in err
    assert all(body["prompt"].startswith("t0 t1") for body in server.generations)


def test_speculative_decoding_is_reported_from_the_servers_counters(bench, server, tmp_path):
    text = (
        'vllm:spec_decode_num_drafts_total{{m="x"}} {0}\nvllm:spec_decode_num_draft_tokens_total{{m="x"}} {1}\n'
        'vllm:spec_decode_num_accepted_tokens_total{{m="x"}} {2}\n'
        'vllm:spec_decode_num_accepted_tokens_per_pos_total{{m="x",position="0"}} {3}\n'
    )
    server.metrics = [text.format(10.0, 20.0, 5.0, 5.0), text.format(14.0, 28.0, 11.0, 8.0)]
    out, _, _ = bench(*SMALL)
    *_, title, rate, length, drafts, drafted, accepted, heading, position = summary_of(out)
    assert title == "---------------Speculative Decoding---------------"
    values = [row[40:].strip() for row in (rate, length, drafts, drafted, accepted, position)]
    assert values == ["75.00", "2.50", "4", "8", "6", "75.00"]
    assert (heading, position[:13]) == ("Per-position acceptance (%):", "  Position 0:")


def test_the_timeline_is_a_page_beside_the_result(bench, tmp_path):
    saved(bench, tmp_path, *SMALL, "--plot-timeline")
    page = (tmp_path / "result.timeline.html").read_text()
    assert page.count("<title>request ") == 3


def test_no_server_ends_in_one_line(bench, server, capsys):
    server.statuses["/v1/models"] = 500
    _, err, code = bench(*SMALL)
    assert code == 1
    assert re.fullmatch(r"vllm: error: no model from \S+/v1/models \(it does not list its models\); .*\n", err)


def test_a_server_that_never_gets_ready_ends_in_one_line(bench, server):
    server.statuses["/v1/completions"] = 503
    _, err, code = bench(*SMALL, "--ready-check-timeout-sec", "1")
    assert code == 1
    assert "is not ready after 1 s: Service Unavailable" in err


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("--goodput", "itl:3"), "--goodput itl: must be of ttft, tpot, e2el"),
        (("--goodput", "ttft=3"), "--goodput ttft=3: must be KEY:VALUE"),
        (("--header", "abc"), "--header abc: must be KEY=VALUE"),
        (("--backend", "openai-chat", "--endpoint", "/v1/completions"), "must end with chat/completions"),
        (("--max-concurrency", "0"), "must be at least 1"),
        (("--ramp-up-strategy", "linear"), "needs --ramp-up-start-rps"),
        (("--ramp-up-strategy", "exponential", "--ramp-up-start-rps", "0", "--ramp-up-end-rps", "3"), "start at 1"),
        (("--dataset-path", "x.json"), "the data set random reads no file"),
        (("--dataset-name", "custom"), "needs --dataset-path"),
        (("--self-timed",), "only works with --dataset-name timed_trace"),
        (("--num-prompts", "0"), "give a number"),
        (("--dataset-name", "random-mm"), "needs image input"),
        (("--backend", "openai-audio"), "needs audio input"),
        (("--use-beam-search",), "not available"),
        (("--random-range-ratio", "1.5"), "from 0 to below 1"),
        (("--percentile-metrics", "ttf"), "must be of ttft"),
        (("--metric-percentiles", "101"), "from 0 to 100"),
        (("--burstiness", "0"), "must be above 0"),
        (("--extra-body", "[1]"), "must be a JSON object"),
        (("--sharegpt-output-len", "3"), "only works with --dataset-name sharegpt"),
        (("--backend", "openai-embeddings", "--temperature", "0"), "not sent by the backend"),
        (("--save-detailed",), "needs --save-result"),
        (("--chat-template-kwargs", "{}"), "get no chat template"),
        (("--tokenizer", "/nowhere/at/all"), "/nowhere/at/all"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_sent(bench, server, argv, reason):
    _, err, code = bench("--model", "m", *argv)
    assert (code, server.generations) == (2, [])
    assert reason in err
    assert err.count("\n") == 1
