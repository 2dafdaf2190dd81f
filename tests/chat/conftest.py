"""A tokenizer that has only what rendering needs."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_clone.chat import ChatRenderer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def renderer(template: str | dict[str, str] | None, cli: str | None = None, **options: Any) -> ChatRenderer:
    """A renderer of a model whose tokenizer brings ``template``."""
    tokenizer: Any = SimpleNamespace(special=SPECIAL, chat_template=template)
    return ChatRenderer(tokenizer, cli, **options)


@pytest.fixture
def user() -> list[dict[str, Any]]:
    return [{"role": "user", "content": "Hi"}]
