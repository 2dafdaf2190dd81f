#!/usr/bin/env python3
"""The time a decoded token takes at least, from bytes and bandwidth, beside the time it takes.

    floor.py MODEL [--context 320] [--tokens 64] [--rounds 5] [--threads N] [--target 85]

Bytes per token: every stored weight that one token reads (of an embedding that is no output layer only a row), and
keys and values of the context. Bandwidth is that of reading a buffer of as many bytes again and again, as decoding
does, so that a model that fits a cache is judged by the cache. It is measured in the same run, before and after each
round, and the best reading counts, since a slow minute of the machine must not make the engine look good. Exits 1 below
--target percent of the floor.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
from limits import read_bandwidth

from vllm_clone import LLM, SamplingParams
from vllm_clone.hub.files import load_hf_config, resolve_model
from vllm_clone.hub.gguf import GGUFFile
from vllm_clone.platforms.cpu import num_usable_cores

MAX_BUFFER_BYTES = 2 << 30
"""Larger than any cache; larger models need no larger buffer."""
READ_SECONDS = 0.25
"""About how long one reading of the bandwidth takes."""
ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


def weight_bytes(model: str) -> int:
    """Bytes of the weights that a decode step reads, as they are stored."""
    sizes: dict[str, int] = {}
    if Path(model).is_file():
        sizes = {name: tensor.nbytes for name, tensor in GGUFFile(model, vocabulary=False).tensors.items()}
        embedding, output = "token_embd.weight", "output.weight"
    else:
        from safetensors import safe_open

        for path in sorted(Path(model).glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    part = file.get_slice(name)
                    sizes[name] = torch.Size(part.get_shape()).numel() * ITEM_BYTES[part.get_dtype()]
        embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    is_tied = output not in sizes
    return sum(size for name, size in sizes.items() if name != embedding or is_tied)


def kv_bytes(model: str, context: int, item: int = 2) -> int:
    """Bytes of keys and values of a context in bf16."""
    config = load_hf_config(resolve_model(model))
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * int(config["num_hidden_layers"]) * int(heads) * int(head_dim) * context * item


def bandwidth(size: int) -> float:
    """Bytes per second of reading a buffer of that size."""
    return read_bandwidth(size, rounds=max(3, int(READ_SECONDS * 20e9 / size)))


class Engine:
    """An engine in this process that decodes one stream."""

    def __init__(self, model: str, context: int, tokens: int) -> None:
        self._llm = LLM(model=model, max_model_len=context + tokens + 16, kv_cache_memory_bytes=1 << 30)
        self._prompt = {"prompt_token_ids": [1000 + i % 1000 for i in range(context - tokens // 2)]}
        self._tokens = tokens

    def _seconds(self, tokens: int) -> float:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        begun = time.perf_counter()
        self._llm.generate([self._prompt], params, use_tqdm=False)
        return time.perf_counter() - begun

    def tpot(self) -> float:
        """Seconds per token after the first; the prompt comes from the prefix cache."""
        short = self._seconds(1)
        return (self._seconds(self._tokens + 1) - short) / self._tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--context", type=int, default=320, help="Tokens in the middle of the measured stretch.")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=num_usable_cores())
    parser.add_argument("--target", type=float, default=0.0, help="Least percentage of the floor.")
    args = parser.parse_args()
    weights, cache = weight_bytes(args.model), kv_bytes(args.model, args.context)
    engine = Engine(args.model, args.context, args.tokens)
    engine.tpot()
    torch.set_num_threads(args.threads)
    size = min(weights + cache, MAX_BUFFER_BYTES)
    speeds, times = [bandwidth(size)], []
    for _ in range(args.rounds):
        torch.set_num_threads(1)
        times.append(engine.tpot())
        torch.set_num_threads(args.threads)
        speeds.append(bandwidth(size))
    best, tpot = max(speeds), statistics.median(times)
    floor = (weights + cache) / best
    print(f"bytes per token: {weights / 1e6:.1f} MB of weights, {cache / 1e6:.2f} MB of KV at {args.context} tokens")
    print(f"bandwidth: {best / 1e9:.1f} GB/s of {size / 1e6:.0f} MB (lowest reading {min(speeds) / 1e9:.1f})")
    print(f"floor {floor * 1e3:.2f} ms, TPOT {tpot * 1e3:.2f} ms (best {min(times) * 1e3:.2f}): {floor / tpot:.0%}")
    return int(100 * floor / tpot < args.target)


if __name__ == "__main__":
    sys.exit(main())
