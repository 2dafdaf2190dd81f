"""VllmConfig: everything the engine is built from, resolved once and passed down."""

import dataclasses
import hashlib
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from vllm_clone.config.cache import CacheConfig, MambaConfig, OffloadConfig
from vllm_clone.config.compilation import AttentionConfig, CompilationConfig, KernelConfig, OptimizationLevel
from vllm_clone.config.flags import (
    flag,
    group_flag,
    level_name,
)
from vllm_clone.config.inputs import LoRAConfig, MultiModalConfig, StructuredOutputsConfig
from vllm_clone.config.model import LoadConfig, ModelConfig
from vllm_clone.config.observability import ObservabilityConfig
from vllm_clone.config.parallel import DeviceConfig, ParallelConfig
from vllm_clone.config.scheduler import SchedulerConfig
from vllm_clone.config.support import gpu_only, later, not_here

SpecMethod = Literal[
    "bailing_hybrid_mtp",
    "bailing_hybrid_v3_mtp",
    "custom_class",
    "deepseek_mtp",
    "dflash",
    "dots3_note_mtp",
    "draft_model",
    "dspark",
    "eagle",
    "eagle3",
    "ernie_mtp",
    "exaone4_5_mtp",
    "exaone_moe_mtp",
    "extract_hidden_states",
    "gemma4_mtp",
    "glm4_moe_lite_mtp",
    "glm4_moe_mtp",
    "glm5_next_mtp",
    "glm_ocr_mtp",
    "hy_v3_mtp",
    "hy_v4_mtp",
    "inkling_mtp",
    "kimi_k3_mtp",
    "longcat_flash_mtp",
    "medusa",
    "mimo_mtp",
    "mimo_v2_mtp",
    "minimax_m3_mtp",
    "mlp_speculator",
    "mtp",
    "nemotron_h_mtp",
    "ngram",
    "ngram_gpu",
    "pangu_ultra_moe_mtp",
    "qwen3_5_mtp",
    "qwen3_next_mtp",
    "qwen4_exp_mtp",
    "step3p5_mtp",
    "suffix",
]


@dataclass(frozen=True)
class VllmConfig:
    """All engine groups, and what belongs to none.

    Built by ``EngineArgs.create_engine_config``; not changed afterwards.
    """

    model_config: ModelConfig = field(default_factory=ModelConfig)
    load_config: LoadConfig = field(default_factory=LoadConfig)
    attention_config: AttentionConfig = group_flag(
        AttentionConfig, "Attention settings as a JSON object; backend is the one that matters.", aliases=("-ac",)
    )
    mamba_config: MambaConfig = field(default_factory=MambaConfig)
    structured_outputs_config: StructuredOutputsConfig = group_flag(
        StructuredOutputsConfig, "Settings of structured outputs as a JSON object."
    )
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    offload_config: OffloadConfig = field(default_factory=OffloadConfig)
    multimodal_config: MultiModalConfig = field(default_factory=MultiModalConfig)
    lora_config: LoRAConfig = field(default_factory=LoRAConfig)
    observability_config: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    compilation_config: CompilationConfig = group_flag(
        CompilationConfig,
        "How the forward pass is run, as a JSON object: mode, cudagraph_mode, capture sizes and more.",
        aliases=("-cc",),
    )
    kernel_config: KernelConfig = group_flag(
        KernelConfig,
        "Kernel settings as a JSON object: moe_backend, linear_backend and so on.",
        support=gpu_only("Choices between kernels"),
    )
    device_config: DeviceConfig = field(default_factory=DeviceConfig)

    speculative_config: dict[str, Any] | None = flag(
        None,
        (
            "Speculative decoding settings; main keys method, model, num_speculative_tokens, "
            "draft_tensor_parallel_size, prompt_lookup_min/max, rejection_sample_method, draft_sample_method, "
            "suffix_decoding_*, quantization, max_model_len."
        ),
        aliases=("-sc",),
        nullable=True,
        support=later("Speculative decoding methods"),
    )
    spec_method: SpecMethod | None = flag(
        None, "Shorthand for the method key.", nullable=True, support=later("Speculative decoding methods")
    )
    spec_model: str | None = flag(
        None, "Shorthand for the model key.", nullable=True, support=later("Speculative decoding methods")
    )
    spec_tokens: int | None = flag(
        None, "Shorthand for the num_speculative_tokens key.", support=later("Speculative decoding methods")
    )
    watermark_config: dict[str, Any] | None = flag(
        None,
        (
            "Keys: key (0..2^64-1, required), algorithm gumbel or dual_key_gumbel, alpha 0.1, context_width 4, "
            "deduplicate_contexts single_turn, deduplicate_contexts_max_history 8192, prf philox, "
            "allow_target_only_watermarking false."
        ),
        nullable=True,
        support=later("Watermarks in text"),
    )
    diffusion_config: dict[str, Any] | None = flag(
        None,
        "Keys: canvas_length (tokens per block) and max_denoising_steps.",
        aliases=("-dc",),
        nullable=True,
        support=later("Diffusion models"),
    )
    kv_transfer_config: dict[str, Any] | None = flag(
        None,
        (
            "Keys: kv_connector, kv_role (kv_producer, kv_consumer, kv_both), engine_id, kv_buffer_device, "
            "kv_port 14579, kv_connector_extra_config, kv_connector_module_path, kv_load_failure_policy fail."
        ),
        nullable=True,
        support=later("KV cache transfers"),
    )
    kv_events_config: dict[str, Any] | None = flag(
        None,
        (
            "Keys: enable_kv_cache_events false, publisher null or zmq, endpoint tcp://*:5557, replay_endpoint, "
            "buffer_steps 10000, hwm 100000, max_queue_size 100000, topic ''."
        ),
        nullable=True,
    )
    ec_transfer_config: dict[str, Any] | None = flag(
        None,
        (
            "Encoder-cache transfer: ec_connector, ec_role (ec_producer, ec_consumer, ec_both), ec_buffer_device, "
            "ec_buffer_size 1e9, ec_ip, ec_port 14579, ec_connector_extra_config."
        ),
        nullable=True,
        support=later("Multimodal inputs"),
    )
    ec_manager_config: dict[str, Any] = flag(
        {}, "Keys: encoder_cache_manager_cls and manager_config for it.", support=later("Multimodal inputs")
    )
    engram_config: dict[str, Any] | None = flag(
        None,
        ("N-gram embedding tables: cpu_offload true, embedding_across_dp false, dp_shared_memory null, use_thp false."),
        nullable=True,
        support=gpu_only("N-gram embedding tables"),
    )
    reasoning_config: dict[str, Any] | None = flag(
        None,
        (
            "Keys reasoning_parser, reasoning_start_str, reasoning_end_str; the end text is forced when a "
            "thinking budget runs out."
        ),
        nullable=True,
        support=later("Reasoning parsers"),
    )
    additional_config: dict[str, Any] = flag(
        {},
        (
            "Free-form JSON handed to the platform plugin; part of the configuration hash, so it must be "
            "JSON-serializable."
        ),
        support=not_here("no platform here takes settings of its own"),
    )
    aux_output_config: dict[str, Any] = flag(
        {},
        "Keys enable_return_routed_experts and max_bytes (LRU capacity; null derives it from KV capacity).",
        support=later("Mixture-of-experts models"),
    )
    profiler_config: dict[str, Any] = flag(
        {},
        (
            "Keys profiler (torch), torch_profiler_dir, torch_profiler_with_stack/with_flops/use_gzip/record_shapes/"
            "with_memory, delay_iterations, max_iterations; adds POST /start_profile and /stop_profile."
        ),
    )
    optimization_level: Annotated[OptimizationLevel, level_name] = flag(
        "O2", "O0: start fastest, steps run through Python. O1 to O3: steps are replayed from a recording. Also -O2."
    )
    performance_mode: Literal["balanced", "interactivity", "throughput"] = flag(
        "balanced", "What the batch defaults favour: throughput doubles them; interactivity and balanced keep them."
    )
    weight_transfer_config: dict[str, Any] | None = flag(
        None,
        "Key backend (nccl, ipc, sparse_nccl, ...) for pushing new weights during RL training.",
        nullable=True,
        support=later("Weight transfers"),
    )
    aggregate_engine_logging: bool = flag(
        False,
        "With DP, logs one combined statistics line instead of one per engine.",
        one_way=True,
        support=later("Data-parallel engines"),
    )
    fail_on_environ_validation: bool = flag(
        False, "Refuse to start when an environment variable that begins with VLLM_ means nothing here."
    )
    gdn_prefill_backend: Literal["flashinfer", "triton", "cutedsl", "aiter_flydsl"] | None = flag(
        None, "Prefill kernel of gated delta-net layers.", support=gpu_only("Gated delta-net kernels")
    )
    kda_prefill_backend: Literal["auto", "triton", "flashkda", "flashinfer", "fused"] | None = flag(
        None, "Prefill kernel of Kimi delta attention.", support=gpu_only("Kimi delta attention kernels")
    )
    kda_decode_backend: Literal["auto", "native", "flashinfer", "triton"] | None = flag(
        None, "Decode kernel of Kimi delta attention.", support=gpu_only("Kimi delta attention kernels")
    )

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes) -> "VllmConfig":
        return msgspec.json.decode(data, type=VllmConfig)

    def compute_hash(self) -> str:
        """Ten hex digits that depend on every value; equal configurations give equal digits everywhere."""
        return hashlib.sha256(msgspec.json.encode(dataclasses.asdict(self), order="sorted")).hexdigest()[:10]


ENGINE_GROUPS: dict[str, Any] = {
    f.name: f.default_factory for f in dataclasses.fields(VllmConfig) if dataclasses.is_dataclass(f.default_factory)
}
"""Field name of VllmConfig → config class."""
