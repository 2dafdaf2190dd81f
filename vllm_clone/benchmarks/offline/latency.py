"""How long one batch takes, again and again."""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from vllm_clone.config import ModelConfig
from vllm_clone.engine.arg_utils import EngineArgs
from vllm_clone.engine.inputs import TokensPrompt
from vllm_clone.engine.llm_engine import LLMEngine
from vllm_clone.errors import ConfigError
from vllm_clone.sampling_params import RequestOutputKind, SamplingParams

PERCENTILES = (10, 25, 50, 75, 90, 99)
LARGEST_ID = 10_000


@dataclass(frozen=True, slots=True)
class LatencyOptions:
    """What is measured; lengths in tokens."""

    input_len: int = 32
    output_len: int = 128
    batch_size: int = 8
    n: int = 1
    num_iters_warmup: int = 10
    num_iters: int = 30
    disable_detokenize: bool = False
    profile: bool = False
    output_json: str | None = None


def _vocabulary(model: ModelConfig) -> int:
    return min(LARGEST_ID, model.vocab_size)


def percentiles(values: list[float]) -> dict[str, float]:
    """Percentile → value, by linear interpolation."""
    return {str(p): float(v) for p, v in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}


def measure(engine_values: dict[str, Any], options: LatencyOptions) -> None:
    """Run the batch, print and keep what was measured.

    Raises:
        ConfigError: the batch is longer than the model takes.
    """
    config = EngineArgs(**{"enable_prefix_caching": False, **engine_values}).create_engine_config("offline")
    model = config.model_config
    if options.profile and not config.profiler_config:
        raise ConfigError("--profile: say what to record and where with --profiler-config.")
    assert model.max_model_len is not None
    if options.input_len + options.output_len > model.max_model_len:
        raise ConfigError(
            f"--input-len {options.input_len} --output-len {options.output_len}: together more than --max-model-len "
            f"({model.max_model_len}); lower one of them."
        )
    engine = LLMEngine(config)
    shape = (options.batch_size, options.input_len)
    prompts = [TokensPrompt(row) for row in np.random.default_rng().integers(0, _vocabulary(model), shape).tolist()]
    params = SamplingParams(
        n=options.n,
        temperature=1.0,
        top_p=1.0,
        ignore_eos=True,
        max_tokens=options.output_len,
        detokenize=not options.disable_detokenize,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )

    def run() -> float:
        begun = time.perf_counter()
        for i, prompt in enumerate(prompts):
            engine.add_request(str(i), prompt, params)
        while engine.has_unfinished_requests:
            engine.step()
        return time.perf_counter() - begun

    if options.profile:
        engine.core.profile(True)
        run()
        engine.core.profile(False)
        return
    print("Warming up...")
    for _ in tqdm(range(options.num_iters_warmup), desc="Warmup iterations", file=sys.stderr):
        run()
    latencies = [run() for _ in tqdm(range(options.num_iters), desc="Bench iterations", file=sys.stderr)]
    average, by_percentile = float(np.mean(latencies)), percentiles(latencies)
    print(f"Avg latency: {average} seconds")
    for name, value in by_percentile.items():
        print(f"{name}% percentile latency: {value} seconds")
    if options.output_json is not None:
        kept = {
            "model_id": engine_values.get("model", model.model),
            "avg_latency": average,
            "latencies": latencies,
            "percentiles": by_percentile,
        }
        Path(options.output_json).write_text(json.dumps(kept, indent=4))
