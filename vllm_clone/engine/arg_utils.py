"""EngineArgs: flag values by name → one resolved VllmConfig. Imports no torch."""

import argparse
import difflib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from vllm_clone import envs
from vllm_clone.config import ENGINE_GROUPS, LoadConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm_clone.config.cache import BlockSize, KVCacheDtype
from vllm_clone.config.flags import FlagSpec, flags_of, keys_of
from vllm_clone.config.kv_cache import kv_dtype_name
from vllm_clone.config.kv_events import kv_events_options
from vllm_clone.config.model import Dtype
from vllm_clone.config.profiler import profiler_options
from vllm_clone.core.structured_output.spec import has_xgrammar
from vllm_clone.errors import ConfigError
from vllm_clone.hub import load_generation_config, load_hf_config, read_json, resolve_model, resolve_tokenizer
from vllm_clone.hub.files import ModelFiles
from vllm_clone.platforms import placement
from vllm_clone.sampling_params import SamplingParams

Usage = Literal["server", "offline"]

ENGINE_FLAGS: dict[str, tuple[str, FlagSpec]] = {
    spec.field: (group, spec)
    for group, config_class in (ENGINE_GROUPS | {"": VllmConfig}).items()
    for spec in flags_of(config_class)
}
"""Flag field → (group in VllmConfig, "" for VllmConfig itself; flag)."""
FLAG_WINS = frozenset(["moe_backend", "linear_backend", "sparse_indexer_topk_backend", "reasoning_parser"])
"""Flags that silently win over the same key of their group's JSON flag; of others only one may be given."""

LOADER_KEYS = {"enable_multithread_load": bool, "num_threads": int}
"""Keys of --model-loader-extra-config for the loaders of Hugging Face checkpoints."""
LENGTH_KEYS = (
    "max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_target_positions",
    "max_sequence_length", "max_seq_length", "seq_len",
)  # fmt: skip
LENGTH_KEPT_BY_ROPE = frozenset(["su", "longrope", "llama3", "yarn", "deepseek_yarn", "deepseek_llama_scaling"])
"""Rope types whose checkpoints already state the scaled length."""
NO_FLOAT16 = frozenset(["gemma2", "gemma3", "gemma3_text", "glm4"])
SAMPLING_DEFAULTS = {
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "temperature": 1.0, "top_k": 0,
    "top_p": 1.0, "min_p": 0.0,
}  # fmt: skip
"""Generation config keys that become sampling defaults, with the library's own defaults."""
GENERATION_KEYS = frozenset([*SAMPLING_DEFAULTS, "max_new_tokens", "max_tokens"])
FALLBACK_MAX_MODEL_LEN = 2048
DEFAULT_BLOCK_SIZE: BlockSize = 32
REASONS = {
    "device": "the only device of this build",
    "path": "where --model is",
    "model_format": "the model's files",
    "tokenizer_path": "--tokenizer, else the model's own",
    "hf_config": "config.json, with --hf-overrides laid over it",
    "architecture": "config.json",
    "vocab_size": "config.json",
    "dtype": "the checkpoint's type, in 16 bits where it can be",
    "max_model_len": "the longest sequence config.json states",
    "fit_max_model_len": "--max-model-len auto",
    "served_model_name": "--model",
    "generation_defaults": "--generation-config and --override-generation-config",
    "eos_token_ids": "generation_config.json, else config.json",
    "block_size": "the CPU kernels' size",
    "kv_cache_dtype": "--dtype",
    "enable_prefix_caching": "on for models that generate",
    "enable_chunked_prefill": "on for models that generate",
    "memory_share_given": "whether --gpu-memory-utilization is given",
    "max_num_batched_tokens": "the device's default, --max-num-seqs and --max-model-len",
    "max_num_seqs": "the device's default and --max-num-batched-tokens",
    "mode": "models run their own code",
    "cudagraph_mode": "--optimization-level and --enforce-eager",
    "max_cudagraph_capture_size": "--max-num-batched-tokens and the mode",
    "cudagraph_capture_sizes": "sorted, without what exceeds --max-num-batched-tokens",
}
"""Field → what its value is derived from."""
BATCH_DEFAULTS: dict[tuple[str, Usage], tuple[int, int]] = {
    ("cpu", "server"): (2048, 128),
    ("cpu", "offline"): (4096, 256),
    ("cuda", "server"): (2048, 256),
    ("cuda", "offline"): (8192, 256),
}
"""(device, usage) → (max_num_batched_tokens, max_num_seqs)."""


class EngineArgs:
    """Values of engine flags; what is not given keeps its default.

    Raises:
        ConfigError: an unknown name, or a value of another type or outside the flag's choices.
    """

    def __init__(self, **values: Any) -> None:
        self.values = {name: _checked(name, value) for name, value in values.items()}

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> "EngineArgs":
        """From parsed flags; attributes that are no engine flag are left to others."""
        return cls(**{k: v for k, v in vars(namespace).items() if k in ENGINE_FLAGS})

    def create_engine_config(self, usage: Usage = "server") -> VllmConfig:
        """Read the model's description and settle every value.

        Raises:
            ConfigError: one line naming flag, value, rule and remedy.
        """
        for problem in envs.problems():
            raise ConfigError(problem)
        config = self.unresolved()
        refuse_what_cannot_act(config)
        if config.fail_on_environ_validation and (unknown := envs.unknown_names()):
            raise ConfigError(f"{unknown[0]}: this environment variable means nothing here; correct it or unset it.")
        for resolve in (
            _check_ranges,
            _resolve_device,
            _resolve_model,
            _resolve_dtype,
            _resolve_length,
            _resolve_cache,
        ):
            resolve(config)
        _resolve_batch(config, usage)
        _resolve_graphs(config)
        _check_observability(config, usage)
        _check_loader(config)
        _check_structured_outputs(config)
        return config

    def unresolved(self) -> VllmConfig:
        """The values in their groups, with JSON flags spread over the fields of theirs."""
        groups: dict[str, dict[str, Any]] = {group: {} for group in (*ENGINE_GROUPS, "")}
        containers = []
        for name, value in self.values.items():
            group, spec = ENGINE_FLAGS[name]
            if spec.container:
                containers.append((spec, value))
            else:
                groups[group][name] = value
        for spec, value in containers:
            _spread(spec, value, groups[spec.field])
        if "gpu_memory_utilization" in self.values:
            groups["cache_config"]["memory_share_given"] = True
        built = {group: cls(**groups[group]) for group, cls in ENGINE_GROUPS.items()}
        return VllmConfig(**built, **groups[""])


def _spread(container: FlagSpec, keys: dict[str, Any], group: dict[str, Any]) -> None:
    """Put the keys of a JSON flag into its group's values."""
    known = keys_of(container)
    for key, value in keys.items():
        name = f"{container.name}.{key}"
        spec = known.get(key.replace("-", "_"))
        if spec is None:
            near = difflib.get_close_matches(key, known, n=1) or list(known)
            raise ConfigError(f"{name} {value}: no such key; did you mean {' or '.join(near)}?")
        field = spec.field.rpartition(".")[2]
        if field in group:
            if field in FLAG_WINS:
                continue
            raise ConfigError(f"{name} {value}: {spec.name} gives it too; leave one of them out.")
        group[field] = _of_type(spec, value, name, from_text=spec.kind == "list")


def refuse_what_cannot_act(config: Any) -> None:
    """Stop at the first value, other than the default, of a flag that this build cannot honour.

    Raises:
        ConfigError: flag, reason and remedy.
    """
    for spec in flags_of(type(config)):
        value = getattr(config, spec.field)
        if spec.container is None:
            _refuse(spec, value)
            continue
        for inner in keys_of(spec).values():
            if "." in inner.field:
                _refuse(inner, getattr(value, inner.field.rpartition(".")[2]))
    for group in ENGINE_GROUPS if isinstance(config, VllmConfig) else ():
        refuse_what_cannot_act(getattr(config, group))


def _refuse(spec: FlagSpec, value: Any) -> None:
    if (refusal := spec.refusal(value)) is not None:
        raise ConfigError(refusal)


def _checked(name: str, value: Any) -> Any:
    """The value of an engine argument as its field has it; numbers may come as text, names as paths."""
    if name not in ENGINE_FLAGS:
        near = difflib.get_close_matches(name, ENGINE_FLAGS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "vllm serve --help=all lists the known ones."
        raise ConfigError(f"{name} is not an engine argument; {hint}")
    spec = ENGINE_FLAGS[name][1]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if name == "dtype":
        value = str(value).removeprefix("torch.")
    if name == "served_model_name" and isinstance(value, str):
        value = [value]
    if name == "compilation_config" and isinstance(value, int):
        value = {"mode": value}
    return _of_type(spec, value, spec.name)


def _of_type(spec: FlagSpec, value: Any, name: str, *, from_text: bool = False) -> Any:
    """A value from Python or JSON as its field has it; numbers and names may come as text."""
    try:
        is_text = isinstance(value, str)
        if (is_text and spec.kind in ("int", "float", "str")) or (type(value) is int and spec.kind == "int"):
            value = spec.parse(str(value))
        if spec.choices and spec.kind != "list" and value is not None and value not in spec.choices:
            raise ValueError(f"not one of {', '.join(map(str, spec.choices))}")
        return spec.check(value, from_text=from_text)
    except ValueError as error:
        raise ConfigError(f"{name} {value}: {error}.") from error


_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "seed": (lambda v: -(2**63) <= v < 2**63, "must be a 64-bit number"),
    "gpu_memory_utilization": (lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
    "kv_cache_memory_bytes": (lambda v: v > 0, "must be positive"),
    "num_gpu_blocks_override": (lambda v: 1 < v < 2**31, "must be in [2, 2^31): block 0 is a placeholder"),
    "max_model_len": (lambda v: v == -1 or v >= 1, "must be at least 1, or -1 or auto"),
    "max_logprobs": (lambda v: v >= -1, "must be at least 0, or -1 for no limit"),
    "max_num_batched_tokens": (lambda v: v >= 1, "must be at least 1"),
    "max_num_seqs": (lambda v: 1 <= v <= 2**20, "must be in [1, 1048576]"),
    "kv_cache_metrics_sample": (lambda v: 0 < v <= 1, "must be above 0 and at most 1"),
    "max_num_queued_reqs": (lambda v: v >= 1, "must be at least 1"),
    "max_num_queued_tokens": (lambda v: v >= 1, "must be at least 1"),
    "long_prefill_token_threshold": (lambda v: v >= 0, "must be at least 0"),
    "watermark": (lambda v: 0 <= v < 1, "must be in [0, 1)"),
    "safetensors_prefetch_num_threads": (lambda v: 1 <= v <= 1024, "must be in [1, 1024]"),
    "safetensors_prefetch_block_size": (lambda v: v >= 1, "must be at least 1"),
    "renderer_num_workers": (lambda v: 1 <= v <= 1024, "must be in [1, 1024]"),
    "stream_interval": (lambda v: v >= 1, "must be at least 1"),
}


def _check_ranges(config: VllmConfig) -> None:
    for name, (ok, rule) in _RANGES.items():
        group, spec = ENGINE_FLAGS[name]
        value = getattr(getattr(config, group), name)
        if value is not None and not ok(value):
            raise ConfigError(f"{spec.name} {value}: {rule}.")


def _check_loader(config: VllmConfig) -> None:
    load = config.load_config
    options = load.model_loader_extra_config
    for key, value in options.items():
        where = f"--model-loader-extra-config.{key} {value}"
        if key not in LOADER_KEYS or load.load_format in ("dummy", "gguf"):
            known = ", ".join(LOADER_KEYS) if load.load_format not in ("dummy", "gguf") else "none"
            raise ConfigError(f"{where}: --load-format {load.load_format} knows no such option; it knows {known}.")
        if type(value) is not LOADER_KEYS[key]:
            raise ConfigError(f"{where}: must be {'true or false' if LOADER_KEYS[key] is bool else 'a whole number'}.")
    if not 1 <= options.get("num_threads", 1) <= 1024:
        raise ConfigError(f"--model-loader-extra-config.num_threads {options['num_threads']}: must be in [1, 1024].")
    if "num_threads" in options and not options.get("enable_multithread_load"):
        raise ConfigError("--model-loader-extra-config.num_threads: needs enable_multithread_load true.")
    profiler_options(config.profiler_config)
    if kv_events_options(config.kv_events_config) is not None and not config.cache_config.enable_prefix_caching:
        raise ConfigError("--kv-events-config: tells of the prefix cache; leave --no-enable-prefix-caching out.")


def _check_structured_outputs(config: VllmConfig) -> None:
    if config.structured_outputs_config.backend == "xgrammar" and not has_xgrammar():
        raise ConfigError(
            "--structured-outputs-config.backend xgrammar: the package is not installed; pip install "
            "'vllm-clone[xgrammar]' or use guidance."
        )


def _check_observability(config: VllmConfig, usage: Usage) -> None:
    """What is measured must have somewhere to show, and something to measure."""
    seen = config.observability_config
    for name in ("kv_cache_metrics", "cudagraph_metrics", "enable_mfu_metrics"):
        if getattr(seen, name) and usage == "offline":
            raise ConfigError(
                f"--{name.replace('_', '-')}: shows in a server's statistics, and this engine has no server; leave it "
                "out."
            )
        if getattr(seen, name) and seen.disable_log_stats:
            raise ConfigError(
                f"--{name.replace('_', '-')}: shows in statistics, which --disable-log-stats switches off; leave one "
                "of them out."
            )
    if seen.kv_cache_metrics and not config.cache_config.enable_prefix_caching:
        raise ConfigError("--kv-cache-metrics: measures the prefix cache; leave --no-enable-prefix-caching out.")
    if seen.kv_cache_metrics_sample != type(seen)().kv_cache_metrics_sample and not seen.kv_cache_metrics:
        raise ConfigError(
            f"--kv-cache-metrics-sample {seen.kv_cache_metrics_sample}: nothing is sampled without --kv-cache-metrics; "
            "give that too."
        )


def _resolve_device(config: VllmConfig) -> None:
    device = config.device_config
    if device.device == "cuda":
        raise ConfigError("--device cuda: the GPU engine is not implemented yet; use --device cpu.")
    device.device = "cpu"
    placement.plan(config.parallel_config)  # what cannot be done is refused before an engine starts


def _resolve_model(config: VllmConfig) -> None:
    model, load = config.model_config, config.load_config
    if isinstance(model.hf_token, str):
        envs.export("HF_TOKEN", model.hf_token)  # where the hub's library looks; the bare flag is what it does anyway
    files = resolve_model(model.model, model.revision, load.download_dir, load.ignore_patterns)
    model.path, model.model_format = str(files.path), files.format
    if load.load_format == "gguf" and files.format != "gguf":
        raise ConfigError(f"--load-format gguf: {model.path} is not a GGUF file; give the .gguf file as the model.")
    if files.format == "gguf" and load.load_format not in ("auto", "gguf", "dummy"):
        raise ConfigError(f"--load-format {load.load_format}: {model.path} is a GGUF file; leave the flag out.")
    if model.quantization == "gguf" and files.format != "gguf":
        raise ConfigError(f"--quantization gguf: {model.path} is not a GGUF file; leave the flag out.")
    hf = _hf_config(model, load, files) | model.hf_overrides
    if isinstance(hf.get("text_config"), dict):
        raise ConfigError(f"{model.path}: multimodal models (text_config in config.json) are not implemented yet.")
    architectures = hf.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise ConfigError(f"{model.path}: config.json names no architectures; set them with --hf-overrides.")
    model.hf_config, model.architecture = hf, architectures[0]
    if not _is_count(hf.get("vocab_size")):
        raise ConfigError(f"{model.path}: config.json has no vocab_size above 0.")
    model.vocab_size = hf["vocab_size"]
    if model.tokenizer is None and model.tokenizer_revision is None:
        model.tokenizer_path = model.path
    else:
        revision = model.tokenizer_revision or model.revision
        model.tokenizer_path = str(resolve_tokenizer(model.tokenizer or model.model, revision, load.download_dir))
    model.served_model_name = model.served_model_name or [model.model]
    _resolve_generation(model, files)


def _hf_config(model: ModelConfig, load: LoadConfig, files: ModelFiles) -> dict[str, Any]:
    if model.hf_config_path is None:
        return load_hf_config(files)
    path = resolve_tokenizer(model.hf_config_path, model.revision, load.download_dir) / "config.json"
    if not path.is_file():
        raise ConfigError(f"--hf-config-path {model.hf_config_path}: {path} does not exist; give its directory.")
    return read_json(path)


def _resolve_generation(model: ModelConfig, files: ModelFiles) -> None:
    """End-of-sequence ids from wherever they stand; sampling defaults unless the source is ``vllm``."""
    if model.generation_config in ("auto", "vllm"):
        source = load_generation_config(files)
    else:
        source = _generation_config_from(model.generation_config)
    eos = source.get("eos_token_id")
    if eos is None:
        eos = model.hf_config.get("eos_token_id")
    eos = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in eos):
        raise ConfigError(f"{model.path}: eos_token_id must be one or more token ids, not {eos!r}.")
    model.eos_token_ids = eos
    for key in model.override_generation_config.keys() - GENERATION_KEYS:
        known = ", ".join(sorted(GENERATION_KEYS))
        raise ConfigError(f"--override-generation-config: {key} is no sampling default; known are {known}.")
    given = {} if model.generation_config == "vllm" else source
    given = given | model.override_generation_config
    defaults = {k: given[k] for k, neutral in SAMPLING_DEFAULTS.items() if given.get(k) not in (None, neutral)}
    max_tokens = given.get("max_tokens", given.get("max_new_tokens"))
    if max_tokens is not None:
        defaults["max_tokens"] = max_tokens
    try:
        msgspec.convert(defaults, SamplingParams).verify()
    except ValueError as error:
        where = f"--generation-config {model.generation_config}"
        raise ConfigError(
            f"{where}: a sampling default cannot be used: {str(error).rstrip('.')}; correct it with "
            "--override-generation-config, or use --generation-config vllm."
        ) from error
    model.generation_defaults = defaults


def _generation_config_from(directory: str) -> dict[str, Any]:
    path = Path(directory).expanduser() / "generation_config.json"
    if not path.is_file():
        raise ConfigError(f"--generation-config {directory}: {path} does not exist; give auto, vllm or its directory.")
    return read_json(path)


def _resolve_dtype(config: VllmConfig) -> None:
    model = config.model_config
    explicit = {"half": "float16", "float": "float32"}.get(model.dtype, model.dtype)
    model_type = model.hf_config.get("model_type")
    if explicit == "float16" and model_type in NO_FLOAT16:
        raise ConfigError(f"--dtype {model.dtype}: {model_type} models overflow in float16; use bfloat16 or float32.")
    if explicit == "auto":
        stored = model.hf_config.get("dtype") or model.hf_config.get("torch_dtype") or "float32"
        stored = str(stored).removeprefix("torch.")
        explicit = stored if stored in ("bfloat16", "float16") else "bfloat16"
        if explicit == "float16" and model_type in NO_FLOAT16:
            explicit = "bfloat16"
    model.dtype = cast(Dtype, explicit)


def _resolve_length(config: VllmConfig) -> None:
    model = config.model_config
    derived = derive_max_model_len(model.hf_config)
    window: Any = model.hf_config.get("sliding_window")
    if model.disable_sliding_window and _is_count(window):
        model.hf_config = model.hf_config | {"sliding_window": None, "use_sliding_window": False}
        derived = min(derived or FALLBACK_MAX_MODEL_LEN, int(window))
    asked = model.max_model_len
    if asked is None or asked == -1:
        model.max_model_len = derived or FALLBACK_MAX_MODEL_LEN
        model.fit_max_model_len = asked == -1
    elif derived is not None and asked > derived and not envs.VLLM_ALLOW_LONG_MAX_MODEL_LEN:
        raise ConfigError(
            f"--max-model-len {asked}: the model supports {derived} tokens; use at most that, or set "
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 if you know that the model copes."
        )


def derive_max_model_len(hf: dict[str, Any]) -> int | None:
    """Longest sequence that config.json states, rope scaling included; None when it states none."""
    if _is_count(hf.get("model_max_length")):
        return int(hf["model_max_length"])
    lengths = [hf[key] for key in LENGTH_KEYS if _is_count(hf.get(key))]
    if not lengths:
        return None
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"config.json: rope_scaling must be an object, not {rope!r}; correct it with --hf-overrides.")
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    scaled = kind not in LENGTH_KEPT_BY_ROPE and not str(hf.get("model_type")).startswith("gemma3")
    factor = rope.get("factor") if scaled else None
    if factor is None:
        return int(min(lengths))
    if not isinstance(factor, int | float) or not 0 < factor < 1e6:
        raise ConfigError(f"config.json: rope factor {factor!r} must be above 0; correct it with --hf-overrides.")
    return int(min(lengths) * factor)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _resolve_cache(config: VllmConfig) -> None:
    cache = config.cache_config
    cache.block_size = cache.block_size or DEFAULT_BLOCK_SIZE
    cache.kv_cache_dtype = cast(KVCacheDtype, kv_dtype_name(cache.kv_cache_dtype, config.model_config.dtype))
    if cache.enable_prefix_caching is None:
        cache.enable_prefix_caching = True


def _resolve_batch(config: VllmConfig, usage: Usage) -> None:
    sched: SchedulerConfig = config.scheduler_config
    max_model_len = config.model_config.max_model_len
    assert max_model_len is not None
    if sched.enable_chunked_prefill is None:
        sched.enable_chunked_prefill = True
    tokens, seqs = BATCH_DEFAULTS[config.device_config.device, usage]
    if config.performance_mode == "throughput":
        tokens, seqs = 2 * tokens, 2 * seqs
    if sched.max_num_seqs is None:
        sched.max_num_seqs = min(seqs, sched.max_num_batched_tokens or seqs)
    if sched.max_num_batched_tokens is None:
        if not sched.enable_chunked_prefill:
            tokens = max(tokens, max_model_len)
        sched.max_num_batched_tokens = max(min(tokens, sched.max_num_seqs * max_model_len), sched.max_num_seqs)
    threshold = sched.long_prefill_token_threshold
    if threshold > max_model_len:
        raise ConfigError(
            f"--long-prefill-token-threshold {threshold}: must be at most --max-model-len ({max_model_len}); lower it, "
            "or leave it out for no limit."
        )
    budget = sched.max_num_batched_tokens
    _check_smaller_limits(sched)
    if budget < sched.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {budget}: must be at least --max-num-seqs ({sched.max_num_seqs}); raise the "
            "former or lower the latter."
        )
    if not sched.enable_chunked_prefill and budget < max_model_len:
        raise ConfigError(
            f"--max-num-batched-tokens {budget}: must be at least --max-model-len ({max_model_len}) without chunked "
            "prefill; raise it or drop --no-enable-chunked-prefill."
        )


def _check_smaller_limits(sched: SchedulerConfig) -> None:
    """Limits below the batch's own, which size no buffers."""
    for name, of in (("max_num_scheduled_tokens", "max_num_batched_tokens"), ("max_num_active_seqs", "max_num_seqs")):
        value, most = getattr(sched, name), getattr(sched, of)
        if value is not None and not 1 <= value <= most:
            flag, above = (f"--{n.replace('_', '-')}" for n in (name, of))
            raise ConfigError(f"{flag} {value}: must be at least 1 and at most {above} ({most}).")
    if sched.max_num_scheduled_tokens is not None and not sched.enable_chunked_prefill:
        raise ConfigError(
            f"--max-num-scheduled-tokens {sched.max_num_scheduled_tokens}: needs chunked prefill, or long prompts "
            "would wait for ever; drop --no-enable-chunked-prefill."
        )
    if sched.long_prefill_token_threshold_adaptive and not sched.long_prefill_token_threshold:
        raise ConfigError(
            "--long-prefill-token-threshold-adaptive: there is no threshold to adapt; give "
            "--long-prefill-token-threshold too."
        )


def _resolve_graphs(config: VllmConfig) -> None:
    """Which steps are replayed from a recording: all but what a flag takes out."""
    compilation, budget = config.compilation_config, config.scheduler_config.max_num_batched_tokens
    assert budget is not None
    if config.model_config.enforce_eager:
        compilation.cudagraph_mode = "NONE"
    elif compilation.cudagraph_mode is None:
        compilation.cudagraph_mode = "NONE" if config.optimization_level == "O0" else "FULL"
    compilation.mode = 0
    sizes, largest = compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size
    if sizes is not None:
        sizes = sorted({size for size in sizes if size <= budget})
        if not sizes or sizes[0] < 1:
            raise ConfigError(
                f"--cudagraph-capture-sizes {compilation.cudagraph_capture_sizes}: must be in [1, {budget}] "
                "(--max-num-batched-tokens); use --enforce-eager to record nothing."
            )
        if largest is not None and largest != sizes[-1]:
            raise ConfigError(
                f"--max-cudagraph-capture-size {largest}: the largest of --cudagraph-capture-sizes is {sizes[-1]}; "
                "leave one of the two out."
            )
        compilation.cudagraph_capture_sizes, largest = sizes, sizes[-1]
    if largest is not None and largest < 0:
        raise ConfigError(f"--max-cudagraph-capture-size {largest}: must be at least 0.")
    largest = budget if largest is None else min(largest, budget)
    compilation.max_cudagraph_capture_size = 0 if compilation.cudagraph_mode == "NONE" else largest
