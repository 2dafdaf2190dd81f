"""The engine's configuration, one dataclass per group. Flags first, resolved values after them."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from vllm_clone.config.flags import HumanInt, IntOrAuto, flag, resolved
from vllm_clone.config.kv_cache import parse_kv_cache_dtype

Dtype = Literal["auto", "bfloat16", "float16", "float32", "half", "float"]
KVCacheDtype = Annotated[
    Literal[
        *("auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head"),
        *("int8", "int8_per_token_head"),
    ],
    parse_kv_cache_dtype,
]
BlockSize = Literal[8, 16, 32, 64, 128, 256]
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


@dataclass
class ModelConfig:
    """Which model, how it is read and what it may be asked."""

    model: str = flag("Qwen/Qwen3-0.6B", "Model: a hub id, a local directory, or a .gguf file.")
    tokenizer: str | None = flag(None, "Tokenizer: a hub id, directory or .gguf file; the model's own when not given.")
    tokenizer_mode: Literal["auto", "hf", "slow"] = flag("auto", "How the tokenizer is built; slow uses transformers.")
    trust_remote_code: bool = flag(False, "Allow Python code that comes with a model's tokenizer.")
    dtype: Dtype = flag("auto", "Data type of weights and activations; auto follows the checkpoint.")
    seed: int = flag(0, "Seed of everything random that a request does not seed itself.")
    revision: str | None = flag(None, "Branch, tag or commit of the model on the hub.", nullable=True)
    max_model_len: IntOrAuto | None = flag(None, "Longest prompt plus output in tokens; auto: what memory allows.")
    max_logprobs: int = flag(20, "Most log-probabilities per token a request may ask for; -1 lifts the limit.")
    logprobs_mode: LogprobsMode = flag("raw_logprobs", "Which scores logprobs report: before or after processing.")
    enforce_eager: bool = flag(False, "Run each step through Python instead of replaying a recording of it.")
    skip_tokenizer_init: bool = flag(False, "Load no tokenizer; prompts are token ids and no text comes back.")
    served_model_name: list[str] | None = flag(
        None, "Names clients may use; the first one appears in answers.", nullable=True
    )
    generation_config: str = flag("auto", "Sampling defaults: auto (the model's), vllm (none), or a directory.")
    override_generation_config: dict[str, Any] = flag({}, "Sampling defaults laid over the generation config.")
    hf_overrides: dict[str, Any] = flag({}, "Values laid over the model's config.json.")

    path: str = resolved("")
    """Local directory or .gguf file."""
    model_format: Literal["hf", "gguf"] = resolved("hf")
    tokenizer_path: str = resolved("")
    hf_config: dict[str, Any] = resolved({})
    """The text model's config.json, or the same facts from GGUF metadata."""
    architecture: str = resolved("")
    vocab_size: int = resolved(0)
    fit_max_model_len: bool = resolved(False)
    """Whether the engine may lower max_model_len to what its KV cache holds (--max-model-len auto)."""
    generation_defaults: dict[str, Any] = resolved({})
    """Sampling defaults that differ from the library's, including max_tokens."""
    eos_token_ids: list[int] = resolved([])
    """All end-of-sequence ids the generation config or the model's config names."""


@dataclass
class LoadConfig:
    """Where weights come from."""

    load_format: Literal["auto", "safetensors", "pt", "gguf", "dummy"] = flag("auto", "Weight format; dummy = random.")
    download_dir: str | None = flag(None, "Directory for downloaded models; the hub's cache by default.", nullable=True)
    use_tqdm_on_load: bool = flag(True, "Show a progress bar while weights load.")


@dataclass
class CacheConfig:
    """The paged KV cache."""

    block_size: BlockSize | None = flag(None, "Tokens per KV block; 16 when not given.")
    gpu_memory_utilization: float = flag(
        0.92,
        "Fraction of the device's memory to use; a CPU without this flag takes a part of what is free.",
        aliases=("--device-memory-utilization",),
    )
    kv_cache_memory_bytes: HumanInt | None = flag(
        None, "Size of the KV cache in bytes; overrides every estimate.", nullable=True
    )
    kv_cache_dtype: KVCacheDtype = flag(
        "auto", "Data type of the KV cache: auto is the model's, fp8 is fp8_e4m3, int8 is int8_per_token_head."
    )
    enable_prefix_caching: bool | None = flag(None, "Reuse KV blocks of equal prompt prefixes; on by default.")
    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"] = flag(
        "sha256", "Hash that identifies a block's prefix."
    )
    num_gpu_blocks_override: int | None = flag(
        None, "Number of KV blocks, whatever the memory; for tests.", nullable=True
    )

    memory_share_given: bool = resolved(False)
    """Whether gpu_memory_utilization was given and so sizes the cache on a CPU too."""


@dataclass
class ParallelConfig:
    """How many devices work together."""

    tensor_parallel_size: int = flag(1, "Devices that share each layer.", aliases=("-tp",))
    pipeline_parallel_size: int = flag(1, "Groups of layers on different devices.", aliases=("-pp",))
    data_parallel_size: int = flag(1, "Independent copies of the engine.", aliases=("-dp",))
    numa_bind: bool = flag(False, "Keep the engine's threads and memory on one NUMA node.")
    numa_bind_nodes: list[int] | None = flag(None, "NUMA node of each rank; the one with most cores by default.")
    numa_bind_cpus: list[str] | None = flag(
        None, "Cores of each rank, such as 0-3 or 0,2,4-7, instead of all cores of its NUMA node."
    )


@dataclass
class SchedulerConfig:
    """What one step may hold."""

    max_num_batched_tokens: HumanInt | None = flag(None, "Most tokens in one step.")
    max_num_seqs: int | None = flag(None, "Most sequences that run at once.")
    max_num_queued_reqs: int | None = flag(None, "Requests in flight above which new ones get HTTP 503.", nullable=True)
    max_num_queued_tokens: HumanInt | None = flag(
        None, "Prompt tokens waiting above which new requests get HTTP 503.", nullable=True
    )
    long_prefill_token_threshold: int = flag(0, "Most tokens per step of one request among others; 0 = any.")
    scheduling_policy: Literal["fcfs", "priority"] = flag("fcfs", "Order of service: arrival, or request priority.")
    enable_chunked_prefill: bool | None = flag(None, "Split long prompts over steps; on by default.")
    scheduler_reserve_full_isl: bool = flag(True, "Admit a request only when its whole sequence fits the free blocks.")
    watermark: float = flag(0.0, "Fraction of KV blocks kept free when admitting requests.")
    stream_interval: int = flag(1, "Tokens per streamed chunk; the first and the last are sent at once.")


@dataclass
class ObservabilityConfig:
    """What the server tells about itself."""

    disable_log_stats: bool = flag(False, "No vllm metrics and no periodic statistics line.", one_way=True)
    enable_log_requests: bool = flag(False, "Log every request.")


@dataclass
class DeviceConfig:
    """Where the model runs."""

    device: Literal["auto", "cpu", "cuda"] = flag("auto", "Device type; auto takes a GPU when there is one.")
