"""Which model, and where its weights come from."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from vllm_clone.config.flags import (
    HumanInt,
    IntOrAuto,
    flag,
    lower,
    resolved,
    str_or_json,
)
from vllm_clone.config.support import gpu_only, later, not_here

Dtype = Literal["auto", "bfloat16", "float16", "float32", "half", "float"]
LogprobsMode = Literal["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]


@dataclass
class ModelConfig:
    """Which model, how it is read and what it may be asked."""

    model: str = flag("Qwen/Qwen3-0.6B", "Model: a hub id, a local directory, or a .gguf file.")
    runner: Literal["auto", "draft", "generate", "pooling"] = flag(
        "auto",
        (
            "Which execution style the instance offers: token generation, pooling (embedding, classification, "
            "scoring, reward) or, internally, a speculative draft."
        ),
        support=later("Pooling models"),
        working=("auto", "generate"),
    )
    convert: Literal["auto", "classify", "embed", "none", "reward"] = flag(
        "auto",
        "Adapter wrapped around the model so that it serves another purpose, normally generative to pooling.",
        support=later("Pooling models"),
        working=("auto", "none"),
    )
    tokenizer: str | None = flag(None, "Tokenizer: a hub id, directory or .gguf file; the model's own when not given.")
    tokenizer_mode: Annotated[str, lower] = flag(
        "auto",
        "How the tokenizer is built; slow uses transformers.",
        support=later("Tokenizers of this kind", "use auto, hf or slow"),
        working=("auto", "hf", "slow"),
    )
    trust_remote_code: bool = flag(False, "Allow Python code that comes with a model's tokenizer.")
    dtype: Dtype = flag("auto", "Data type of weights and activations; auto follows the checkpoint.")
    seed: int = flag(0, "Seed of everything random that a request does not seed itself.")
    hf_config_path: str | None = flag(
        None, "Where to read the model configuration when it lives apart from the weights.", nullable=True
    )
    allowed_local_media_path: str = flag(
        "", "Directory below which file:// media URLs may be read.", support=later("Multimodal inputs")
    )
    allowed_media_domains: list[str] | None = flag(
        None, "Host names from which http(s) media may be fetched.", nullable=True, support=later("Multimodal inputs")
    )
    revision: str | None = flag(None, "Branch, tag or commit of the model on the hub.", nullable=True)
    code_revision: str | None = flag(
        None,
        "Branch, tag or commit for remote code on the hub.",
        nullable=True,
        support=not_here("no code is taken from a model's repository"),
    )
    tokenizer_revision: str | None = flag(None, "Branch, tag or commit of the tokenizer repository.", nullable=True)
    max_model_len: IntOrAuto | None = flag(
        None, "Longest prompt plus output in tokens: 4096, 4k, 4K; auto or -1: what memory allows."
    )
    quantization: Annotated[str, lower] | None = flag(
        None,
        "How weights are quantized; the checkpoint says so itself when the flag is not given.",
        aliases=("-q",),
        nullable=True,
        support=later("Quantized checkpoints other than GGUF"),
        working=("gguf",),
    )
    quantization_config: dict[str, Any] | None = flag(
        None,
        (
            "JSON with keys linear, moe (a scheme name or {weight, activation}), ignore (list of layer patterns) "
            "and targets (pattern -> online scheme)."
        ),
        nullable=True,
        support=later("Quantized checkpoints other than GGUF"),
    )
    allow_deprecated_quantization: bool = flag(
        False,
        "Turn the refusal of deprecated quantization methods into a warning.",
        support=later("Quantized checkpoints other than GGUF"),
    )
    enforce_eager: bool = flag(
        False, "Run each step through Python instead of replaying a recording of it, as -cc.cudagraph_mode=NONE does."
    )
    enable_return_routed_experts: bool = flag(
        False,
        "Record which experts each token used and returns them as auxiliary output.",
        support=later("Mixture-of-experts models"),
    )
    return_sampling_mask: bool = flag(
        False,
        "Returns, per sampled token, the set of tokens left after all sampling filters.",
        support=later("Sampling masks in answers"),
    )
    max_logprobs: int = flag(20, "Most log-probabilities per token a request may ask for; -1 lifts the limit.")
    logprobs_mode: LogprobsMode = flag("raw_logprobs", "Which scores logprobs report: before or after processing.")
    use_fp64_gumbel: bool = flag(
        False,
        "Draw sampling noise in float64 so very unlikely tokens keep their true probability, at a throughput cost.",
        support=later("Double-precision sampling draws"),
    )
    enable_trace_replay: bool = flag(
        False,
        (
            "Let a request dictate the exact output token ids while real logprobs are computed; reserves a "
            "per-request buffer."
        ),
        support=later("Replayed traces"),
    )
    disable_sliding_window: bool = flag(
        False, "Ignore sliding-window attention and limits the context to the window size instead."
    )
    disable_cascade_attn: bool = flag(
        True,
        "The negated form has decoding requests read a prefix that they share together, as is always done on a CPU.",
        support=not_here("on a CPU that changes no bit of an answer"),
        working=(False,),
    )
    skip_tokenizer_init: bool = flag(False, "Load no tokenizer; prompts are token ids and no text comes back.")
    enable_prompt_embeds: bool = flag(
        False,
        (
            "Accept prompt_embeds (serialized tensors) instead of text; wrong shapes can crash the engine, so for "
            "trusted clients only."
        ),
        support=later("Prompt embeddings"),
    )
    served_model_name: list[str] | None = flag(
        None, "Names clients may use; the first one appears in answers.", nullable=True
    )
    config_format: str = flag(
        "auto",
        "File format of the model configuration.",
        support=later("Mistral-format configurations", "give a Hugging Face checkpoint"),
        working=("auto", "hf"),
        known=(
            "auto",
            "hf",
            "mistral",
        ),
    )
    hf_token: bool | str | None = flag(
        None, "Token for the Hugging Face hub; the bare flag uses the token stored by the hub CLI.", secret=True
    )
    hf_overrides: dict[str, Any] = flag({}, "Values laid over the model's config.json.")
    model_class_overrides: dict[str, Any] = flag(
        {}, "Map from architecture name to 'module:class' registered at start-up; a development aid."
    )
    pooler_config: dict[str, Any] | None = flag(
        None,
        (
            "Pooling settings: pooling_type (or seq_/tok_pooling_type), use_activation, dimensions, "
            "enable_chunked_processing, max_embed_len, logit_mean, logit_sigma, step_tag_id, returned_token_ids, "
            "task."
        ),
        nullable=True,
        support=later("Pooling models"),
    )
    generation_config: str = flag("auto", "Sampling defaults: auto (the model's), vllm (none), or a directory.")
    override_generation_config: dict[str, Any] = flag({}, "Sampling defaults laid over the generation config.")
    enable_sleep_mode: bool = flag(
        False,
        (
            "Make the engine able to release device memory on demand: level 1 offloads weights to host and drops "
            "KV, level 2 discards both."
        ),
        support=gpu_only("Sleeping engines"),
    )
    sleep_preserve_parameter_names: list[str] = flag(
        [], "Glob patterns of parameters kept across level-2 sleep.", support=gpu_only("Sleeping engines")
    )
    enable_cumem_allocator: bool = flag(
        False, "Allocate weights and KV through CUDA virtual-memory management.", support=gpu_only("CUDA memory pools")
    )
    enable_nccl_comm_suspend: bool = flag(
        False,
        "Also releases NCCL communicator memory while asleep (experimental).",
        support=gpu_only("NCCL communicators"),
    )
    model_impl: Literal["auto", "terratorch", "transformers", "vllm"] = flag(
        "auto",
        "Which model code to run: the server's own, the Transformers library's, or TerraTorch's.",
        support=later("Models run by other libraries", "use vllm"),
        working=("auto", "vllm"),
    )
    logits_processors: list[str] | None = flag(
        None,
        "Class paths of logits processors for the whole server; see vllm_clone.sample.logits_processor.",
        nullable=True,
    )
    io_processor_plugin: str | None = flag(
        None,
        "Name of an installed plugin that converts task-specific input and output for pooling models.",
        nullable=True,
        support=later("Pooling models"),
    )
    renderer_num_workers: int = flag(
        1, "Threads per API process for tokenizing, template rendering and media preprocessing."
    )
    logits_processor_pattern: str | None = flag(
        None,
        "Regular expression of class names that a request may name in logits_processors.",
        support=later("Logits processors named by requests", "name them with --logits-processors"),
    )
    override_attention_dtype: str | None = flag(
        None,
        "Data type used in attention.",
        support=not_here("attention runs in the data type of the model", "choose the type with --dtype"),
    )

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

    load_format: Annotated[str, lower] = flag(
        "auto",
        "Weight format; dummy = random.",
        support=later("Loaders of this kind", "use auto, safetensors, pt, gguf or dummy"),
        working=("auto", "safetensors", "pt", "gguf", "dummy", "hf"),
    )
    download_dir: str | None = flag(None, "Directory for downloaded models; the hub's cache by default.", nullable=True)
    safetensors_load_strategy: Literal["eager", "lazy", "prefetch", "torchao"] | None = flag(
        None,
        (
            "Reading strategy: lazy = memory map, eager = read whole file into RAM first, prefetch = warm the "
            "page cache first, torchao = rebuild torchao tensors."
        ),
        nullable=True,
        support=later("torchao checkpoints", "use lazy, eager or prefetch"),
        working=(None, "lazy", "eager", "prefetch"),
    )
    safetensors_prefetch_num_threads: int = flag(8, "Threads that read files into the page cache while prefetching.")
    safetensors_prefetch_block_size: HumanInt = flag(16777216, "Bytes per prefetch read.")
    model_loader_extra_config: dict[str, Any] = flag(
        {},
        "Options of the loader: enable_multithread_load reads files with num_threads (8) threads ahead of their use.",
    )
    ignore_patterns: list[str] = flag(["original/**/*"], "Globs of repository files neither downloaded nor loaded.")
    use_tqdm_on_load: bool = flag(True, "Show a progress bar while weights load.")
    pt_load_map_location: Annotated[str | dict[str, str], str_or_json] = flag(
        "cpu", "map_location passed to torch.load for .bin/.pt checkpoints: a device string or a JSON map."
    )
