#!/usr/bin/env python3
"""Perplexity of a text under our run of a GGUF file, beside transformers' float32 run of its dequantized weights.

    perplexity.py [--model FILE.gguf] [--text FILE] [--tokens 2000] [--dtype bfloat16]

The file's matrices are multiplied by as they are stored, with inputs rounded; this measures what that costs.
Without --model it is SmolLM2-135M-Instruct in Q4_1. Exits 1 when ours differs by more than --limit, as a share.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
from parity import logprobs, model_file, reference

from vllm_clone import LLM, SamplingParams

PROSE = Path(__file__).parents[1] / "tests" / "data" / "prose.txt"


def our_logprobs(path: Path, text: str, count: int, dtype: str) -> tuple[list[int], torch.Tensor]:
    """The text's first tokens, and the log-probability of each but the first."""
    llm = LLM(model=str(path), dtype=dtype, max_model_len=count + 1, kv_cache_memory_bytes=512 << 20)
    tokens = llm.get_tokenizer().encode(text)[:count]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": tokens}], params, use_tqdm=False)
    rows = zip(output.prompt_logprobs[1:], tokens[1:], strict=True)
    return tokens, torch.tensor([row[token].logprob for row, token in rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=model_file())
    parser.add_argument("--text", type=Path, default=PROSE)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=float, default=0.01)
    args = parser.parse_args()

    tokens, ours = our_logprobs(args.model, args.text.read_text(), args.tokens, args.dtype)
    theirs = logprobs(reference(torch.float32, args.model), tokens)
    our_perplexity, their_perplexity = (math.exp(-scores.double().mean().item()) for scores in (ours, theirs))
    change = our_perplexity / their_perplexity - 1
    print(
        f"perplexity of {len(tokens)} tokens: ours {our_perplexity:.4f}, transformers in float32 "
        f"{their_perplexity:.4f}, {change:+.2%} (limit {args.limit:.0%}); "
        f"mean |dlogprob| {(ours - theirs).abs().mean():.4f}"
    )
    return 0 if abs(change) <= args.limit else 1


if __name__ == "__main__":
    sys.exit(main())
