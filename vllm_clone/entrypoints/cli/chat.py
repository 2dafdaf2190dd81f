"""`vllm chat`: talk to a chat model on any OpenAI-compatible server."""

import argparse
from typing import Any

NAME = "chat"
HELP = "Talk to a chat model on a running server."


def add_client_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of both clients."""
    parser.add_argument("--url", default="http://localhost:8000/v1", help="Base URL of the server.")
    parser.add_argument("--model-name", help="Model to talk to; the server's first model when not given.")
    parser.add_argument("--api-key", help="API key; overrides the environment variable OPENAI_API_KEY.")
    parser.add_argument("--stats", action="store_true", help="After each answer, show time to first token and speed.")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_client_arguments(parser)
    parser.add_argument("--system-prompt", help="System message that opens the conversation.")
    parser.add_argument("-q", "--quick", metavar="MESSAGE", help="Send one message, print the answer, exit.")


def run(args: argparse.Namespace) -> int:
    from vllm_clone.entrypoints.cli import openai_client as shared

    client, model = shared.connect(args)
    messages: list[dict[str, Any]] = []
    if args.system_prompt is not None:
        messages.append({"role": "system", "content": args.system_prompt})

    def turn(text: str) -> None:
        question = {"role": "user", "content": text}
        request: dict[str, Any] = {"model": model, "messages": [*messages, question]} | shared.usage_option(args.stats)
        stream = client.chat.completions.create(stream=True, **request)
        answer = shared.show(shared.chat_deltas(stream))
        messages.extend([question, {"role": "assistant", "content": answer.text}])
        if args.stats:
            shared.print_stats(answer)

    return shared.converse(turn, args.quick, "Please enter a message for the chat model:", args.url)
