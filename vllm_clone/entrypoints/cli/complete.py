"""`vllm complete`: let a model on any OpenAI-compatible server continue a text."""

import argparse
from typing import Any

from vllm_clone.entrypoints.cli.chat import add_client_arguments

NAME = "complete"
HELP = "Complete a text with a model on a running server."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_client_arguments(parser)
    parser.add_argument("--max-tokens", type=int, help="Most tokens to generate; the server's default when not given.")
    parser.add_argument("-q", "--quick", metavar="PROMPT", help="Complete one prompt, print the text, exit.")


def run(args: argparse.Namespace) -> int:
    from vllm_clone.entrypoints.cli import openai_client as shared

    client, model = shared.connect(args)
    options: dict[str, Any] = {"model": model} | shared.usage_option(args.stats)
    if args.max_tokens is not None:
        options["max_tokens"] = args.max_tokens

    def turn(text: str) -> None:
        stream = client.completions.create(prompt=text, stream=True, **options)
        answer = shared.show(shared.completion_deltas(stream))
        if args.stats:
            shared.print_stats(answer)

    return shared.converse(turn, args.quick, "Please enter prompt to complete:", args.url)
