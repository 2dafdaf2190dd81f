"""Samples of each data set."""

import json
from collections import Counter
from pathlib import Path

import pytest

from vllm_clone.benchmarks.serve import datasets
from vllm_clone.benchmarks.serve.flags import all_flags
from vllm_clone.benchmarks.serve.sample import Sample
from vllm_clone.errors import ConfigError
from vllm_clone.tokenizers import get_tokenizer


@pytest.fixture
def tokenizer(tokenizer_dir):
    return get_tokenizer(str(tokenizer_dir))


@pytest.fixture
def load(tokenizer):
    """Samples of a set, with flags written as attributes."""

    def run(name: str, text: str | None = None, path: Path | None = None, template: bool = False, **flags):
        values = {flag.dest: flag.default for flag in all_flags()} | {"num_prompts": 4} | flags
        if path is not None and text is not None:
            path.write_text(text)
        values["dataset_path"] = str(path)
        said: list[str] = []
        return datasets.load(name, datasets.Request(values, tokenizer, template, said.append))

    return run


def rows(*objects: dict) -> str:
    return "".join(json.dumps(o) + "\n" for o in objects)


@pytest.mark.parametrize("length", [1, 7, 64, 500])
def test_random_prompts_have_their_length_after_text_and_back(load, tokenizer, length):
    samples = load("random", num_prompts=20, random_input_len=length, random_output_len=3)
    assert {len(tokenizer.encode(s.prompt)) for s in samples} == {length}
    assert {(s.prompt_len, s.output_len) for s in samples} == {(length, 3)}


def test_random_prompts_follow_the_seed(load):
    prompts = [[s.prompt for s in load("random", random_input_len=30, seed=seed)] for seed in (1, 1, 2)]
    assert prompts[0] == prompts[1] != prompts[2]


def test_random_lengths_spread_over_the_whole_range(load):
    samples = load(
        "random", num_prompts=400, random_input_len=10, random_output_len=8,
        random_range_ratio='{"input": 0.5, "output": 0.25}',
    )  # fmt: skip
    assert {s.prompt_len for s in samples} == set(range(5, 16))
    assert {s.output_len for s in samples} == set(range(6, 11))


def test_a_random_prefix_is_shared(load, tokenizer):
    samples = load("random", random_input_len=10, random_prefix_len=40)
    assert {s.prompt_len for s in samples} == {50}
    starts = {s.prompt[:20] for s in samples}
    assert len(starts) == 1


def test_each_prefix_is_repeated_and_the_remainder_dropped(load):
    samples = load(
        "prefix_repetition", num_prompts=7, prefix_repetition_num_prefixes=2, prefix_repetition_prefix_len=40,
        prefix_repetition_suffix_len=8, prefix_repetition_output_len=5,
    )  # fmt: skip
    assert sorted(Counter(s.prompt[:15] for s in samples).values()) == [3, 3]
    assert {s.output_len for s in samples} == {5}


def test_fewer_prompts_than_prefixes_are_refused(load):
    with pytest.raises(ConfigError, match="fewer than"):
        load("prefix_repetition", num_prompts=3)


def conversation(prompt: str, answer: str) -> dict:
    return {"conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]}


def test_sharegpt_takes_length_from_the_answer_and_drops_what_is_out_of_bounds(load, tmp_path, tokenizer):
    good = conversation("tell me more", "once upon a time")
    bad = [
        conversation("a", "long enough answer"),
        conversation("long enough", "x"),
        conversation("ab " * 900, "answer"),
    ]
    text = json.dumps([good, *bad, {"conversations": []}])
    samples = load("sharegpt", text, tmp_path / "s.json", num_prompts=0)
    size = len(tokenizer.encode("once upon a time"))
    assert samples == [Sample("tell me more", len(tokenizer.encode("tell me more")), size)]
    fixed = load("sharegpt", text, tmp_path / "s.json", num_prompts=0, sharegpt_output_len=9)
    assert sorted(s.output_len for s in fixed) == [9, 9]  # a short answer no longer matters


def test_burstgpt_takes_lengths_of_gpt4_rows(load, tmp_path):
    text = "Timestamp,Model,Request tokens,Response tokens\n0,GPT-4,20,3\n1,GPT-4,21,0\n2,ChatGPT,9,9\n3,GPT-4,22,5\n"
    samples = load("burstgpt", text, tmp_path / "b.csv", num_prompts=2)
    assert sorted((s.prompt_len, s.output_len) for s in samples) == [(20, 3), (22, 5)]


def test_custom_rows_go_through_the_chat_template(load, tmp_path):
    text = rows({"prompt": "one", "output_tokens": 4}, {"prompt": "two", "output_tokens": 5})
    samples = load("custom", text, tmp_path / "c.jsonl", template=True, num_prompts=0, disable_shuffle=True)
    assert [(s.prompt, s.output_len) for s in samples] == [
        ("<s> user : one assistant :", 256),
        ("<s> user : two assistant :", 256),
    ]
    own = load("custom", text, tmp_path / "c.jsonl", num_prompts=0, custom_output_len=-1, disable_shuffle=True)
    assert [(s.prompt, s.output_len) for s in own] == [("one", 4), ("two", 5)]


def test_a_small_set_is_repeated_unless_told_not_to(load, tmp_path):
    path, text = tmp_path / "c.jsonl", rows({"prompt": "one"}, {"prompt": "two"})
    assert len(load("custom", text, path, num_prompts=5)) == 5
    assert len(load("custom", text, path, num_prompts=5, no_oversample=True)) == 2


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", r"c.jsonl:1: not valid JSON"),
        ("[]\n", r"c.jsonl:1: must be a JSON object"),
        ('{"prompt": "a", "output_tokens": 1}\n{"prompt": 3}\n', r"c.jsonl:2: needs a field 'output_tokens'"),
        ("", "no sample came out"),
    ],
)
def test_a_wrong_file_is_refused_with_the_line(load, tmp_path, text, reason):
    with pytest.raises(ConfigError, match=reason):
        load("custom", text, tmp_path / "c.jsonl", custom_output_len=-1)


def test_spec_bench_takes_first_turns_of_a_category(load, tmp_path):
    text = rows({"category": "math", "turns": ["1+1?", "more"]}, {"category": "writing", "turns": ["Write"]})
    samples = load("spec_bench", text, tmp_path / "s.jsonl", num_prompts=0, spec_bench_category="math")
    assert [(s.prompt, s.output_len) for s in samples] == [("1+1?", 256)]


def test_speed_bench_reads_the_subsets_file(load, tmp_path):
    (tmp_path / "throughput_1k.jsonl").write_text(rows({"messages": [{"role": "user", "content": "Hi"}]}))
    samples = load("speed_bench", path=tmp_path, num_prompts=0, speed_bench_dataset_subset="throughput_1k")
    assert [(s.prompt, s.output_len) for s in samples] == [("Hi", 4096)]


def test_sonnet_prompts_share_their_first_lines(load, tmp_path, tokenizer):
    text = "".join(f"line {i} of the poem\n" for i in range(200))
    samples = load(
        "sonnet", text, tmp_path / "poem.txt", sonnet_input_len=400, sonnet_prefix_len=200, sonnet_output_len=6
    )
    assert all(abs(s.prompt_len - 400) < 40 for s in samples)
    assert len({s.prompt[:100] for s in samples}) == 1
    assert len({s.prompt for s in samples}) == 4


def test_a_traces_blocks_are_the_same_where_their_ids_are(load, tmp_path):
    text = rows(
        {"timestamp": 2, "input_length": 40, "output_length": 4, "hash_ids": [1, 2, 4]},
        {"timestamp": 1, "input_length": 48, "output_length": 5, "hash_ids": [1, 2, 3]},
    )
    first, second = load("timed_trace", text, tmp_path / "t.jsonl", timed_trace_sec_multiplier=0.5)
    assert (first.timestamp, second.timestamp) == (0.5, 1.0)
    assert (len(first.prompt), len(second.prompt)) == (48, 40)
    assert first.prompt[:32] == second.prompt[:32]
    assert first.prompt[32:40] != second.prompt[32:]


def test_rows_of_a_hub_set_come_from_a_local_file(load, tmp_path):
    path = tmp_path / "q.jsonl"
    samples = load("hf", rows({"turns": ["First", "Second"]}), path, hf_name="philschmid/mt-bench", num_prompts=0)
    assert [(s.prompt, s.output_len) for s in samples] == [("First", 256)]
    with pytest.raises(ConfigError, match="must be one of"):
        load("hf", path=path, hf_name="nobody/knows")
    with pytest.raises(ConfigError, match="not rows of"):
        load("hf", path=path, hf_name="openai/gsm8k")
