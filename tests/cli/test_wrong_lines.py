"""What people get wrong, and the one line that helps them: on stderr, exit code 2 (1 for the environment)."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
SERVE: list[tuple[str, str]] = [
    # names
    ("M --max-modle-len 4", "unknown flag --max-modle-len; did you mean --max-model-len"),
    ("M --tensor-parallel 2 --gpu-memory-utilisation 0.5", "unknown flag --gpu-memory-utilisation; did you mean --gpu"),
    ("M --task embed", "unknown flag --task; vllm serve has no --task; use --runner pooling"),
    ("M --guided-decoding-backend x", "it is now --structured-outputs-config.backend"),
    ("M --max-num 5", "ambiguous option: --max-num could match"),
    ("M N", "unexpected argument 'N'"),
    ("M --tp 2", "unknown flag --tp"),
    ("M --no-disable-log-stats", "unknown flag --no-disable-log-stats; did you mean"),
    ("--served-model-name x M", "no model given; write vllm serve MODEL before the flags"),
    # values
    ("M --port", "--port: expected one argument"),
    ("M --port http", "--port http: not a whole number"),
    ("M --port 70000", "--port 70000: must be between 1 and 65535"),
    ("M --dtype bf16", "--dtype bf16: not one of auto, bfloat16"),
    ("M --dtype bfloat61", "did you mean bfloat16?"),
    ("M --max-model-len 1.5K", "K is a power of 1024 and takes whole numbers; use k"),
    ("M --max-model-len lots", "--max-model-len lots: 'lots' is not a number such as 4096, 4k"),
    ("M --max-model-len 0", "--max-model-len 0: must be at least 1, or -1 or auto"),
    ("M --max-num-seqs 2k", "--max-num-seqs 2k: not a whole number"),
    ("M --gpu-memory-utilization 90", "--gpu-memory-utilization 90.0: must be above 0 and at most 1"),
    ("M --block-size 17", "--block-size 17: not one of"),
    ("M --enable-prefix-caching=false", "takes no value; write --enable-prefix-caching or --no-enable-prefix-caching"),
    ("M --watermark 1", "--watermark 1.0: must be in [0, 1)"),
    ("M --max-logprobs -2", "--max-logprobs -2: must be at least 0, or -1"),
    ("M --api-key=", "--api-key: an empty key would let everyone in"),
    ("M -O9", "--optimization-level 9: not one of O0, O1, O2, O3"),
    ("M --shutdown-timeout -1", "--shutdown-timeout -1: must be at least 0"),
    # JSON
    ("M --hf-overrides {rope:1}", "--hf-overrides {rope:1}: not valid JSON"),
    ("M --hf-overrides [1]", "--hf-overrides [1]: must be a JSON object"),
    ("M --allowed-origins [1]", "--allowed-origins [1]: Expected `str`, got `int`"),
    ("M -cc.mood=0", "--compilation-config.mood 0: no such key; did you mean mode?"),
    ("M -cc.mode=fast", "--compilation-config.mode fast: not a whole number"),
    ("M --port.x 1", "--port.x: --port takes int, no JSON object; leave the dot out"),
    ("M --hf-overrides. 1", "--hf-overrides.: a key is missing around a dot"),
    ("M --hf-overrides.a", "--hf-overrides.a: expected one argument"),
    ("M --override-generation-config.temprature 1", "temprature is no sampling default; known are"),
    # flags that contradict each other
    ("M --api-server-count 2 --cudagraph-metrics", "--cudagraph-metrics: several API servers write no statistics line"),
    ("M --cudagraph-metrics --disable-log-stats", "--cudagraph-metrics: shows in statistics"),
    ("M --kv-cache-metrics --no-enable-prefix-caching", "--kv-cache-metrics: measures the prefix cache"),
    ("M --kv-cache-metrics-sample 0.5", "nothing is sampled without --kv-cache-metrics"),
    ("M --kv-cache-metrics --kv-cache-metrics-sample 0", "--kv-cache-metrics-sample 0.0: must be above 0"),
    ("M --enable-offline-docs --disable-fastapi-docs", "--enable-offline-docs: contradicts --disable-fastapi-docs"),
    ("M --model-loader-extra-config.threads 2", "knows no such option; it knows enable_multithread_load, num_threads"),
    ("M --load-format dummy --model-loader-extra-config.num_threads 2", "it knows none"),
    ("M --model-loader-extra-config.num_threads 2", "num_threads: needs enable_multithread_load true"),
    ("M --model-loader-extra-config.enable_multithread_load 2", "must be true or false"),
    ("M --quantization gguf", "is not a GGUF file; leave the flag out"),
    ("M --kv-events-config.topics x", "--kv-events-config: Object contains unknown field `topics`; the keys are"),
    ("M --kv-events-config.publisher zmq", "a publisher needs enable_kv_cache_events true"),
    ("M --api-server-count 0", "--api-server-count 0: must be in [1, 256]"),
    ("M --api-server-count 2 --disable-frontend-multiprocessing", "leave --disable-frontend-multiprocessing out"),
    ("M --max-num-batched-tokens 4 --max-num-seqs 5", "--max-num-batched-tokens 4: must be at least --max-num-seqs"),
    ("M --no-enable-chunked-prefill --max-num-batched-tokens 512", "must be at least --max-model-len (4096) without"),
    ("M --max-num-active-seqs 999", "--max-num-active-seqs 999: must be at least 1 and at most --max-num-seqs (128)"),
    ("M --long-prefill-token-threshold-adaptive", "there is no threshold to adapt; give --long-prefill"),
    ("M --max-model-len 8k", "--max-model-len 8000: the model supports 4096 tokens; use at most that, or set"),
    ("M --attention-backend CPU_ATTN -ac.backend=CPU_ATTN", "--attention-backend gives it too; leave one of them out"),
    ("M --enable-log-outputs", "--enable-log-outputs: needs --enable-log-requests too"),
    ("M --enable-per-request-metrics --disable-log-stats", "leave --disable-log-stats out"),
    ("M --fingerprint-mode custom", "--fingerprint-mode custom and --fingerprint-value TEXT need each other"),
    ("M --ssl-keyfile FILE", "--ssl-keyfile: TLS needs --ssl-certfile too"),
    ("M --cudagraph-capture-sizes 8 16 --max-cudagraph-capture-size 8", "--max-cudagraph-capture-size 8: the largest"),
    # files and code
    ("/no/such/model", "Model /no/such/model does not exist; give a local directory, a .gguf file, or a hub id"),
    ("FILE", "is a file but not GGUF; give its directory, or a .gguf file"),
    ("EMPTY", "has no config.json; is it a complete Hugging Face checkpoint?"),
    ("BROKEN", "config.json cannot be read as JSON"),
    ("M --ssl-certfile /no/cert.pem", "--ssl-certfile /no/cert.pem: No such file or directory"),
    ("M --ssl-certfile FILE", "are no certificate and its key in PEM form"),
    ("M --chat-template /no/template", "--chat-template /no/template: No such file or directory; give a readable file"),
    ("M --log-config-file /no/log.json", "--log-config-file /no/log.json: No such file or directory"),
    ("M --log-config-file FILE", "--log-config-file"),
    ("M --middleware nosuch.Layer", "--middleware nosuch.Layer: cannot be imported (ModuleNotFoundError"),
    ("M --middleware json.loads", "--middleware json.loads: is neither a class nor an async function"),
    ("M --generation-config /nowhere", "--generation-config /nowhere"),
    ("M --hf-config-path EMPTY", "config.json does not exist; give its directory"),
    ("M --load-format gguf", "--load-format gguf"),
    # what this build has not
    ("M --quantization awq", "--quantization awq: Quantized checkpoints other than GGUF are not implemented yet"),
    ("M -tp 2", "--tensor-parallel-size 2: Tensor and pipeline parallel workers are not implemented yet; leave"),
    ("M --lora-modules a=b", "LoRA adapters are not implemented yet; leave the flag out"),
    ("M --enable-lora", "--enable-lora: LoRA adapters are not implemented yet; leave the flag out"),
    ("M --runner pooling", "--runner pooling: Pooling models are not implemented yet; auto, generate work"),
    ("M --enable-sleep-mode", "--enable-sleep-mode: Sleeping engines exist only on a GPU; leave the flag out on a CPU"),
    ("M --swap-space 8", "--swap-space 8.0: preempted requests are computed again, never swapped out"),
    ("M -cc.mode=3", "--compilation-config.mode 3: Compiled models are not implemented yet; 0 works; use mode 0"),
    ("M --spec-model X --api-server-count 1", "--spec-model X: Speculative decoding methods are not implemented yet"),
    ("M --kv-cache-dtype nvfp4", "--kv-cache-dtype nvfp4: the CPU kernels store no elements of fewer than 8 bits"),
    ("M --device cuda", "--device cuda: the GPU engine is not implemented yet; use --device cpu"),
]  # fmt: skip
FILES: list[tuple[str, str]] = [
    ("port: [1", "not valid YAML in line"),
    ("port: abc", "--port abc: not a whole number"),
    ("prot: 8000", "unknown flag --prot; did you mean --port"),
    ("- port", "must map flag names to values"),
    ("config: other.yaml", "names another config file; merge the two"),
    ("max-num-seqs: 4", "no model given; write vllm serve MODEL before the flags (the file has none)"),
    ("model: M\nenable-lora: true", "--enable-lora: LoRA adapters are not implemented yet"),
]


@pytest.fixture
def words(tmp_path: Path):
    """A command line's words with M, FILE, EMPTY and BROKEN standing for paths."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "some.file").write_text("neither this nor that")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    paths = {"M": "model", "FILE": "some.file", "EMPTY": "empty", "BROKEN": "broken"}

    def replace(line: str) -> list[str]:
        return [str(tmp_path / paths[word]) if word in paths else word for word in line.split()]

    return replace


@pytest.mark.parametrize(("line", "message"), SERVE)
def test_a_wrong_serve_line(fails, words, line, message):
    text, code = fails("serve", *words(line))
    assert message in text
    assert code == 2


@pytest.mark.parametrize(("yaml", "message"), FILES)
def test_a_wrong_config_file_is_named(fails, words, tmp_path, yaml, message):
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.replace("model: M", f"model: {tmp_path / 'model'}"))
    text, code = fails("serve", "--config", str(file))
    assert message in text
    assert code == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["srve"], "unknown command 'srve'; did you mean serve?"),
        (["serve", "M", "--config"], "--config: no file given"),
        (["serve", "--config", "a", "--config", "b"], "--config may be given once"),
        (["serve", "M", "--config", "/no/such.yaml"], "--config /no/such.yaml: No such file or directory"),
        (["chat", "--urll", "x"], "did you mean --url?"),
        (["complete", "--max-tokens", "x"], "--max-tokens: invalid int value: 'x'"),
        (["collect-env", "x"], "unexpected argument 'x'"),
    ],
)
def test_a_wrong_line_of_another_kind(fails, argv, message):
    text, code = fails(*argv)
    assert message in text
    assert code == 2


def test_an_environment_variable_that_means_nothing_may_be_refused(fails, words, monkeypatch):
    monkeypatch.setenv("VLLM_ATENTION_BACKEND", "x")
    text, code = fails("serve", *words("M --fail-on-environ-validation"))
    assert text.startswith("VLLM_ATENTION_BACKEND: this environment variable means nothing here")
    assert code == 2


def test_a_port_in_use_is_trouble_with_the_environment(fails, words):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        text, code = fails("serve", *words(f"M --host 127.0.0.1 --port {port}"))
    assert "in use; stop the other server or choose another port" in text
    assert code == 1


def test_the_answer_comes_at_once(words):
    """Under a second is what a person calls at once; the bound leaves room for a busy machine."""
    command = [sys.executable, "-m", "vllm_clone.entrypoints.cli.main", "serve", *words("M --enable-lora")]
    best = 60.0
    for _ in range(3):
        begun = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        best = min(best, time.perf_counter() - begun)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert best < 2
