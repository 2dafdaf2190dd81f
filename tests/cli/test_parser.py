"""A command line becomes values; a wrong one becomes one line."""

from typing import Any

import pytest

from vllm_clone.entrypoints.cli import serve
from vllm_clone.entrypoints.cli.parser import FlagParser, UsageError


@pytest.fixture
def parse():
    """Parse a `vllm serve` command line into a dict of what was given."""

    def run(*argv: str) -> dict[str, Any]:
        parser = FlagParser("vllm serve", serve.USAGE, "Serve.")
        serve.add_arguments(parser)
        given = vars(parser.parse(argv))
        return {k: v for k, v in given.items() if not (k in ("model_tag", "config") and v is None)}

    return run


@pytest.mark.parametrize(
    ("argv", "values"),
    [
        ("", {}),
        ("M", {"model_tag": "M"}),
        ("--model X", {"model": "X"}),
        ("--max-model-len 1k", {"max_model_len": 1000}),
        ("--max_model_len=4K", {"max_model_len": 4096}),
        ("--max-model-len -1", {"max_model_len": -1}),
        ("--max-model-len auto", {"max_model_len": -1}),
        ("--max-num-batched-tokens 2k", {"max_num_batched_tokens": 2000}),
        ("--kv-cache-memory-bytes 1G", {"kv_cache_memory_bytes": 2**30}),
        ("--max_num_seqs 8", {"max_num_seqs": 8}),
        ("--gpu-memory-utilization .5", {"gpu_memory_utilization": 0.5}),
        ("--device-memory-utilization .5", {"gpu_memory_utilization": 0.5}),
        ("-tp 1 -pp=1", {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}),
        ("--enable-prefix-caching", {"enable_prefix_caching": True}),
        ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
        ("--no_enable_prefix_caching", {"enable_prefix_caching": False}),
        ("--disable-log-stats", {"disable_log_stats": True}),
        ("--port 8001 --port 8002", {"port": 8002}),
        ("--served-model-name a b", {"served_model_name": ["a", "b"]}),
        ("--served-model-name a --served-model-name b", {"served_model_name": ["b"]}),
        ("M --api-key k1 k2", {"model_tag": "M", "api_key": ["k1", "k2"]}),
        ('--allowed-origins ["a","b"]', {"allowed_origins": ["a", "b"]}),
        ("--allowed-origins a b", {"allowed_origins": ["a", "b"]}),
        ('--hf-overrides {"a":{"b":1}}', {"hf_overrides": {"a": {"b": 1}}}),
        ("--block-size 32", {"block_size": 32}),
        ("--dtype half", {"dtype": "half"}),
        ("--max-model 5", {"max_model_len": 5}),
        ("--max-num-b 5", {"max_num_batched_tokens": 5}),
        ("--revision None", {"revision": None}),
        ("--host=", {"host": None}),
        ("--served-model-name None", {"served_model_name": None}),
    ],
)
def test_command_lines(parse, argv, values):
    assert parse(*argv.split()) == values


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--max-model-len 1.5K", "--max-model-len 1.5K: '1.5K': K is a power of 1024 and takes whole numbers; use k"),
        ("--max-model-len 1x", "--max-model-len 1x: '1x' is not a number such as"),
        ("--max-model-len=", "--max-model-len : '' is not a number"),
        ("--max-num-seqs 2k", "--max-num-seqs 2k: not a whole number"),
        ("--port abc", "--port abc: not a whole number"),
        ("--port " + "9" * 30, "larger than 64 bits hold"),
        ("--max-model-len " + "9" * 5000, "larger than 64 bits hold"),
        ("--kv-cache-memory-bytes 8388608T", "--kv-cache-memory-bytes 8388608T: larger than 64 bits hold"),
        ("--watermark much", "--watermark much: not a number"),
        ("--dtype int3", "--dtype int3: not one of auto, bfloat16, float16, float32, half, float"),
        ("--dtype bfloat61", "did you mean bfloat16?"),
        ("--kv-cache-dtype nvfp4", "--kv-cache-dtype nvfp4: not served: the CPU kernels store no elements of fewer"),
        ("--block-size 17", "--block-size 17: not one of 8, 16, 32, 64, 128, 256"),
        ("--hf-overrides {bad", "--hf-overrides {bad: not valid JSON"),
        ('--hf-overrides {"a":NaN}', "not valid JSON (NaN is no JSON number)"),
        ("--served-model-name \udcff", "argument '\\udcff' is not valid UTF-8"),
        ("--hf-overrides [1]", "--hf-overrides [1]: must be a JSON object"),
        ("--allowed-origins [1]", "--allowed-origins [1]: Expected `str`, got `int`"),
        ("--allowed-origins [x", "--allowed-origins [x: not valid JSON"),
        (
            "--enable-prefix-caching=false",
            "--enable-prefix-caching takes no value; write --enable-prefix-caching or --no-",
        ),
        ("--no-disable-log-stats", "unknown or not yet implemented flag --no-disable-log-stats; did you mean"),
        ("--max-modle-len 512", "unknown or not yet implemented flag --max-modle-len; did you mean --max-model-len"),
        ("--nosuch-thing 1", "vllm serve --help=all lists the flags that work"),
        ("--max-num 5", "ambiguous option: --max-num could match --max-num-batched-tokens, --max-num-seqs"),
        ("-tp2", "unknown or not yet implemented flag -tp2"),
        ("--tp 2", "unknown or not yet implemented flag --tp"),
        ("--port", "--port: expected one argument"),
        ("--served-model-name", "--served-model-name: expected at least one argument"),
        ("M N", "unexpected argument 'N'"),
        ("M --swap-space 4", "unknown or not yet implemented flag --swap-space"),
        ("--quantization awq", "unknown or not yet implemented flag --quantization"),
    ],
)
def test_wrong_command_lines(parse, argv, message):
    with pytest.raises(UsageError) as caught:
        parse(*argv.split())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_nothing_after_a_double_dash_is_a_flag(parse):
    assert parse("--", "--help") == {"model_tag": "--help"}


def test_an_empty_value_is_null_only_where_null_means_something(parse):
    assert parse("--uds", "") == {"uds": None}
    with pytest.raises(UsageError, match="--max-num-seqs : not a whole number"):
        parse("--max-num-seqs", "")
