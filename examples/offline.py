#!/usr/bin/env python3
"""Generate text without a server.

offline.py MODEL    (a Hugging Face directory, a .gguf file, or a hub id)
"""

import argparse

from vllm_clone import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    args = parser.parse_args()

    llm = LLM(model=args.model, max_model_len=2048)
    prompts = ["The capital of France is", "The first ten prime numbers are", "In the beginning there was"]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24)):
        print(f"{output.prompt!r} → {output.outputs[0].text!r}")

    conversation = [{"role": "user", "content": "What is the capital of France?"}]
    (answer,) = llm.chat(conversation, SamplingParams(temperature=0, max_tokens=48))
    print("chat:", answer.outputs[0].text)


if __name__ == "__main__":
    main()
