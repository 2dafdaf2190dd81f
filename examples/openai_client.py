#!/usr/bin/env python3
"""Ask a running server through the openai package, at once and as a stream.

openai_client.py [--url http://localhost:8000/v1] [QUESTION]
"""

import argparse

import openai


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    args = parser.parse_args()

    client = openai.OpenAI(base_url=args.url, api_key="EMPTY")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": args.question}]

    reply = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=64)
    print("at once: ", reply.choices[0].message.content)

    print("streamed: ", end="")
    stream = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=64, stream=True)
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
