"""Fields that vLLM takes without effect in a server like this one: taken, and said so in the log."""

import pytest

from vllm_clone.entrypoints.openai import requests


@pytest.mark.parametrize("name", sorted(requests.NO_EFFECT))
def test_a_field_without_effect_is_logged_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(requests, "log_once", lambda logger, level, message: said.append(message))
    requests.CompletionRequest.model_validate({"prompt": "x", name: {"a": "b"}})
    assert [name in message for message in said] == [True]
    requests.CompletionRequest.model_validate({"prompt": "x", name: None})
    assert len(said) == 1
