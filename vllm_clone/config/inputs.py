"""Inputs beyond text, adapters, and how outputs are constrained."""

from dataclasses import dataclass
from typing import Any, Literal

from vllm_clone.config.flags import (
    flag,
    json_key,
)
from vllm_clone.config.support import later


@dataclass
class MultiModalConfig:
    """Images, video and audio."""

    language_model_only: bool = flag(
        False,
        "Set every modality's item limit to 0, so the server behaves as text-only and need not load encoders.",
        support=later("Multimodal inputs"),
    )
    limit_mm_per_prompt: dict[str, Any] = flag(
        {},
        (
            "JSON of allowed items per request and modality, either a count or an object {count, "
            "num_frames|width|height|length} whose extra keys size the profiling dummy."
        ),
        support=later("Multimodal inputs"),
    )
    enable_mm_embeds: bool = flag(
        False,
        "Accept ready-made embeddings for media; trusted clients only because wrong shapes can crash the engine.",
        support=later("Multimodal inputs"),
    )
    media_io_kwargs: dict[str, Any] = flag(
        {},
        'Per-modality options for decoding media, e.g. {"video": {"num_frames": 40}}.',
        support=later("Multimodal inputs"),
    )
    mm_processor_kwargs: dict[str, Any] | None = flag(
        None,
        "Options forwarded to the HF processor; request-level values are merged over them, nested scopes included.",
        nullable=True,
        support=later("Multimodal inputs"),
    )
    mm_processor_cache_gb: float = flag(
        4.0,
        "GiB of processed media kept per process; total use is this times (api_server_count + data_parallel_size).",
        support=later("Multimodal inputs"),
    )
    mm_processor_cache_type: Literal["lru", "shm"] = flag(
        "lru",
        "lru mirrors the cache in front end and engine; shm shares one FIFO area in shared memory.",
        support=later("Multimodal inputs"),
    )
    mm_hasher_algorithm: Literal["blake3", "sha256", "sha512"] = flag(
        "blake3",
        "Hash identifying media items for caching; SHA variants suit FIPS environments.",
        support=later("Multimodal inputs"),
    )
    mm_shm_cache_max_object_size_mb: int = flag(
        128, "Largest object in MiB stored in the shared-memory cache.", support=later("Multimodal inputs")
    )
    mm_encoder_only: bool = flag(
        False,
        (
            "Run only the media encoder and skips the language model, for encoder processes of a disaggregated "
            "deployment."
        ),
        support=later("Multimodal inputs"),
    )
    mm_encoder_tp_mode: Literal["data", "weights"] = flag(
        "weights",
        "weights slices the encoder over TP ranks; data replicates it and slices the batch of media.",
        support=later("Multimodal inputs"),
    )
    mm_encoder_attn_backend: str | None = flag(
        None,
        "Attention kernel for vision encoders; names as for --attention-backend.",
        nullable=True,
        support=later("Multimodal inputs"),
        known=(
            "FLASH_ATTN",
            "TORCH_SDPA",
            "TRITON_ATTN",
            "FLASHINFER",
            "ROCM_AITER_FA",
        ),
    )
    mm_encoder_attn_dtype: Literal["fp8"] | None = flag(
        None, "fp8 quantizes vision attention.", nullable=True, support=later("Multimodal inputs")
    )
    mm_encoder_fp8_scale_path: str | None = flag(
        None, "JSON with per-layer Q/K/V scales for static scaling.", nullable=True, support=later("Multimodal inputs")
    )
    mm_encoder_fp8_scale_save_path: str | None = flag(
        None,
        "Where calibrated dynamic scales are written once the history is full.",
        nullable=True,
        support=later("Multimodal inputs"),
    )
    mm_encoder_fp8_scale_save_margin: float = flag(
        1.5, "Factor applied to saved scales as headroom.", support=later("Multimodal inputs")
    )
    interleave_mm_strings: bool = flag(
        False,
        (
            "With string content format, keeps media placeholders at their original positions between text pieces "
            "instead of moving them to the front."
        ),
        support=later("Multimodal inputs"),
    )
    skip_mm_profiling: bool = flag(
        False,
        "Leave media encoders out of start-up memory profiling; the operator must reserve room.",
        support=later("Multimodal inputs"),
    )
    video_pruning_rate: float | None = flag(
        None, "Fraction of each video's tokens to drop, in [0, 1).", nullable=True, support=later("Multimodal inputs")
    )
    video_pruning_method: Literal["evs", "vidcom2"] = flag(
        "evs", "Algorithm used for dropping video tokens.", support=later("Multimodal inputs")
    )
    mm_tensor_ipc: Literal["direct_rpc", "torch_shm"] = flag(
        "direct_rpc",
        "How media tensors travel from API process to engine: serialized messages, or shared memory without copies.",
        support=later("Multimodal inputs"),
    )
    mm_processor_device: Literal["auto", "cpu", "cuda", "xpu"] = flag(
        "auto", "Device for image and video transforms of fast HF processors.", support=later("Multimodal inputs")
    )
    mm_ipc_gpu_memory_gb: float = flag(
        0.0,
        (
            "GiB of device memory set aside from the KV budget for media work in API processes, such as hardware "
            "video decode."
        ),
        support=later("Multimodal inputs"),
    )
    mm_device_do_normalize: bool | None = flag(
        None,
        "Move pixel rescale and normalization from the processor to the device in front of the encoder.",
        support=later("Multimodal inputs"),
    )


@dataclass
class LoRAConfig:
    """Adapters."""

    enable_lora: bool | None = flag(
        None, "Load the LoRA machinery so that requests can name adapters.", support=later("LoRA adapters")
    )
    max_loras: int = flag(1, "Different adapters allowed in one batch (device slots).", support=later("LoRA adapters"))
    max_lora_rank: Literal[1, 8, 16, 32, 64, 128, 256, 320, 512] = flag(
        16, "Highest adapter rank that can be loaded.", support=later("LoRA adapters")
    )
    lora_dtype: Literal["auto", "bfloat16", "float16"] = flag(
        "auto", "Precision of adapter weights.", support=later("LoRA adapters")
    )
    enable_tower_connector_lora: bool = flag(
        False,
        "Extend LoRA to the vision tower and connector of supported multimodal models (experimental).",
        support=later("LoRA adapters"),
    )
    max_cpu_loras: int | None = flag(
        None,
        "Adapters cached in host memory, least recently used first out.",
        nullable=True,
        support=later("LoRA adapters"),
    )
    fully_sharded_loras: bool = flag(
        False, "Shard both low-rank matrices over TP instead of one.", support=later("LoRA adapters")
    )
    lora_target_modules: list[str] | None = flag(
        None,
        "Module name suffixes that receive adapters; others stay plain even if the adapter has weights for them.",
        nullable=True,
        support=later("LoRA adapters"),
    )
    default_mm_loras: dict[str, Any] | None = flag(
        None,
        "Map from modality to adapter path applied whenever that modality is present.",
        nullable=True,
        support=later("LoRA adapters"),
    )
    specialize_active_lora: bool = flag(
        False, "Capture separate graphs for 1, 2, 4 ... max_loras active adapters.", support=later("LoRA adapters")
    )
    enable_mixed_moe_lora_format: bool = flag(
        False,
        "Use the general 2-D MoE adapter wrapper so 2-D and 3-D adapter files can be mixed.",
        support=later("LoRA adapters"),
    )
    enable_moe_shared_loras: bool = flag(
        False, "Read MoE adapters whose outer matrices are shared by all experts.", support=later("LoRA adapters")
    )


@dataclass
class StructuredOutputsConfig:
    """Outputs that follow a grammar, and chains of thought."""

    reasoning_parser: str = flag(
        "",
        "Parser that splits the chain of thought from the answer.",
        support=later("Reasoning parsers"),
        known=(
            "deepseek_r1",
            "deepseek_v3",
            "deepseek_v4",
            "deepseek_v41",
            "poolside_v1",
            "cohere_command3",
            "cohere_command4",
            "ernie45",
            "gemma4",
            "glm45",
            "glm47",
            "ling3",
            "openai_gptoss",
            "granite",
            "granite_thinking_parser",
            "hf",
            "holo2",
            "hunyuan_a13b",
            "hy_v3",
            "hy_v4",
            "kimi_k2",
            "kimi_k3",
            "k2_horizon",
            "mimo",
            "minicpmv",
            "minimax_m2",
            "minimax_m2_append_think",
            "minimax_m3",
            "mistral",
            "nemotron_v3",
            "olmo3",
            "plamo3",
            "muse_glimmer",
            "qwen3",
            "seed_oss",
            "step3",
            "step3p5",
            "inkling",
        ),
    )
    reasoning_parser_plugin: str = flag(
        "", "Python file imported to register more reasoning parsers.", support=later("Reasoning parsers")
    )
    backend: Literal["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"] = json_key(
        "auto",
        (
            "Library that compiles grammars: xgrammar (pip install 'vllm-clone[xgrammar]') or guidance; auto takes "
            "the faster one that is installed and can."
        ),
        support=later("Other grammar libraries", "use guidance or xgrammar"),
        working=("xgrammar", "guidance"),
    )
    disable_any_whitespace: bool = json_key(False, "No free whitespace in JSON.")
    disable_additional_properties: bool = json_key(
        False, "No JSON properties beyond the schema's, unless it allows them; only guidance ever has them."
    )
    enable_in_reasoning: bool = json_key(
        False, "Constrain the chain of thought too.", support=later("Reasoning parsers")
    )
