"""The scripts under benchmarks/: comparing servers, the soak, and model files."""

import argparse
import json
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import psutil
import pytest
import safetensors.torch
import torch

from tests.benchmarks.fake_server import FakeServer, running

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "benchmarks"


def run_script(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run a script as a user does."""
    command = [sys.executable, *(str(a) for a in argv)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)


def server_command(*options: str) -> str:
    """A command that starts a fake server."""
    return shlex.join([sys.executable, "-m", "tests.benchmarks.fake_server", "{port}", *options]).replace(
        "'{port}'", "{port}"
    )


def rows(out: str, first: str) -> list[list[str]]:
    """Cells of the Markdown rows that begin with a word."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines() if line[:1] == "|"]
    return [row for row in cells if row[0] == first]


def test_every_script_is_in_the_readme():
    text = (SCRIPTS / "README.md").read_text()
    scripts = [str(path.relative_to(SCRIPTS)) for path in SCRIPTS.rglob("*.py")]
    assert [name for name in scripts if name not in text] == []


def test_compare_gives_figures_of_every_server_and_ratios_to_the_first(tmp_path):
    argv = ["--rounds", "2", "--workload", "w:2,4,8,5,3", "--logs", tmp_path, "--json", tmp_path / "all.json"]
    a, b = (
        f"{name}={server_command(*options)}"
        for name, options in (("a", ("--delay", "0.001")), ("b", ("--delay", "0.02")))
    )
    ended = run_script(SCRIPTS / "cpu/compare.py", "--server", a, "--server", b, *argv)
    assert ended.returncode == 0, ended.stderr
    first, second = rows(ended.stdout, "w")
    assert (first[1], first[6:]) == ("a", ["", "", ""])
    assert second[1] == "b"
    assert all(float(ratio) > 1 for ratio in second[7:])  # the delay is between tokens
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["workloads"]["w"]["prefix_len"] == 3
    assert [len(found["runs"]["w"][name]) for name in "ab"] == [2, 2]
    assert found["start_seconds"].keys() == found["memory_bytes"].keys() == {"a", "b"}


def test_compare_fails_when_a_request_fails(tmp_path):
    server = f"a={server_command('--fail-after', '2')}"
    ended = run_script(
        SCRIPTS / "cpu/compare.py", "--server", server, "--rounds", "1", "--workload", "w:1,3,8,4", "--logs", tmp_path
    )
    assert ended.returncode == 1
    assert "failed: Service Unavailable" in ended.stderr


def test_compare_leaves_no_server_when_one_does_not_start(tmp_path):
    mark = f"0.0000{os.getpid()}"
    ok, broken = f"a={server_command('--delay', mark)}", f"b={sys.executable} -c pass"
    ended = run_script(SCRIPTS / "cpu/compare.py", "--server", ok, "--server", broken, "--logs", tmp_path)
    assert ended.returncode == 1
    assert f"b ended with 0; its log is {tmp_path}/compare-b.log" in ended.stderr
    assert not any(mark in (p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))


def test_the_known_servers_get_the_same_room(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS / "cpu"))
    module = runpy.run_path(str(SCRIPTS / "cpu/compare.py"))
    args = argparse.Namespace(
        ours="O", vllm="V", llama_cpp="L", model="M", gguf="G", served_model_name="m", server=["x=y"]
    )
    commands = module["commands_of"](args, module["Room"](longest=936, requests=4), argparse.ArgumentParser())
    assert list(commands) == ["ours", "vllm", "llama.cpp", "x"]
    assert "O serve M --port {port} --served-model-name m --max-model-len 1000 --max-num-seqs 4" in commands["ours"]
    assert "V serve M --port {port} --served-model-name m --max-model-len 1000 --max-num-seqs 4" in commands["vllm"]
    assert "L -m G --port {port} -a m -c 4000 -np 4" in commands["llama.cpp"]


@pytest.fixture
def fake() -> FakeServer:
    with running() as server:
        server.metrics = ['vllm:num_requests_running{m="x"} 0.0\nvllm:kv_cache_usage_perc{m="x"} 0.0\n']
        yield server


def test_a_soak_counts_how_requests_ended(fake):
    ended = run_script(SCRIPTS / "soak.py", "--url", fake.url, "--requests", "40", "--streams", "4", "--aborts", "0.5")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    finished, aborted = (int(word) for word in ended.stdout.splitlines()[-1].split()[:3:2])
    assert finished + aborted == 40
    assert min(finished, aborted) > 5


def test_a_soak_fails_when_a_request_is_lost(fake):
    fake.failures = [(500, "gone")]
    ended = run_script(SCRIPTS / "soak.py", "--url", fake.url, "--requests", "20", "--streams", "2")
    assert ended.returncode == 1
    assert "failed: 500" in ended.stdout


def test_a_soak_fails_when_a_kv_block_stays_taken(fake, monkeypatch):
    fake.metrics = ['vllm:num_requests_running{m="x"} 0.0\nvllm:kv_cache_usage_perc{m="x"} 0.1\n']
    ended = run_script(
        SCRIPTS / "soak.py", "--url", fake.url, "--requests", "4", "--streams", "2", "--settle-seconds", "0"
    )
    assert ended.returncode == 1
    assert "10.00% of the KV blocks taken" in ended.stderr


@pytest.mark.parametrize(
    ("memory", "is_flat"), [([50, 100, 101, 102], True), ([50, 100, 103, 106], False), ([50, 100, 90, 80], True)]
)
def test_memory_is_judged_from_a_quarter_of_the_run_on(memory, is_flat):
    module = runpy.run_path(str(SCRIPTS / "soak.py"))
    stretches = [module["Row"](done, 1.0, m << 20) for done, m in zip((10, 30, 60, 100), memory, strict=True)]
    assert module["memory_is_flat"](stretches, 0.05) is is_flat


@pytest.mark.parametrize(("gaps", "is_steady"), [([9, 5, 5, 5.5], True), ([9, 5, 5, 6], False)])
def test_the_pace_is_judged_between_the_second_quarter_and_the_last(gaps, is_steady):
    module = runpy.run_path(str(SCRIPTS / "soak.py"))
    stretches = [module["Row"](i, gap, 0) for i, gap in enumerate(gaps)]
    assert module["pace_is_steady"](stretches, 0.15) is is_steady


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tokenizer_dir: Path) -> Path:
    """A model of make_model.py with two layers, four query heads of 16 and two key heads."""
    path = tmp_path_factory.mktemp("model")
    writer = gguf.GGUFWriter(path / "tokenizer.gguf", "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{i}" for i in range(96)])
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    shape = ["--layers", "2", "--hidden", "64", "--intermediate", "128", "--heads", "4", "--kv-heads", "2"]
    ended = run_script(
        SCRIPTS / "cpu/make_model.py", path / "m", "--tokenizer", tokenizer_dir, "--gguf-tokenizer",
        path / "tokenizer.gguf", *shape,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return path / "m"


def gguf_tensors(model: Path, kind: str) -> dict[str, tuple[gguf.GGMLQuantizationType, torch.Tensor]]:
    """(type, values) of each tensor of a made GGUF file."""
    reader = gguf.GGUFReader(model.with_name(f"{model.name}-{kind}.gguf"))
    return {
        t.name: (t.tensor_type, torch.from_numpy(np.array(gguf.dequantize(t.data, t.tensor_type))))
        for t in reader.tensors
    }


def test_a_made_gguf_file_holds_the_weights_of_the_checkpoint(tiny):
    checkpoint = safetensors.torch.load_file(tiny / "model.safetensors")
    found = gguf_tensors(tiny, "bf16")
    assert len(found) == len(checkpoint) == 2 * 9 + 2
    assert checkpoint["model.embed_tokens.weight"].shape == (96, 64)
    for ours, theirs in (
        ("model.embed_tokens.weight", "token_embd.weight"), ("model.norm.weight", "output_norm.weight"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down.weight"),
        ("model.layers.1.self_attn.v_proj.weight", "blk.1.attn_v.weight"),
    ):  # fmt: skip
        assert torch.equal(found[theirs][1], checkpoint[ours].float())
    assert (json.loads((tiny / "config.json").read_text()))["vocab_size"] == 96


def test_rows_of_q_and_k_are_in_llama_cpps_order(tiny):
    checkpoint = safetensors.torch.load_file(tiny / "model.safetensors")
    found = gguf_tensors(tiny, "bf16")["blk.0.attn_k.weight"][1]
    rows_of_head = [row for i in range(8) for row in (i, i + 8)]  # the two that rotate together are neighbours
    order = [16 * head + row for head in range(2) for row in rows_of_head]
    assert torch.equal(found, checkpoint["model.layers.0.self_attn.k_proj.weight"].float()[order])


def test_the_four_bit_file_is_close_to_the_other(tiny):
    exact, rounded = gguf_tensors(tiny, "bf16"), gguf_tensors(tiny, "q4_1")
    kinds = {name: kind.name for name, (kind, _) in rounded.items()}
    assert kinds["token_embd.weight"] == "Q8_0"
    assert kinds["blk.0.attn_norm.weight"] == "F32"
    assert kinds["blk.1.ffn_up.weight"] == kinds["blk.0.attn_q.weight"] == "Q4_1"
    steps = 0.16 / 15  # a block of 32 values of deviation 0.02 spans less than 0.16
    for name, (_, values) in rounded.items():
        assert (values - exact[name][1]).abs().max() <= steps / 2 + 1e-3
