"""Log-probabilities in the two forms of the OpenAI API, and vLLM's prompt_logprobs."""

import math
from collections.abc import Sequence
from typing import Any

from vllm_clone.entrypoints.openai.answers import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob, CompletionLogprobs
from vllm_clone.outputs import Logprob, PositionLogprobs
from vllm_clone.tokenizers import Tokenizer

FLOOR = -9999.0
"""Stands for minus infinity, which JSON lacks."""


class LogprobFormatter:
    """Writes one request's log-probabilities.

    Args:
        tokenizer: for the bytes of tokens; None gives token ids instead of text.
        as_ids: write tokens as ``token_id:N``.
    """

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_ids = as_ids or tokenizer is None

    def completion(
        self,
        token_ids: Sequence[int],
        positions: Sequence[PositionLogprobs | None],
        num_top: int,
        offset: int,
        exact: bool = False,
    ) -> CompletionLogprobs:
        """The completions form. ``offset`` counts the characters of token texts that came before.

        ``exact`` keeps every candidate (``logprob_token_ids``); otherwise the sampled one and the top ``num_top``.
        """
        out = CompletionLogprobs([], [], [], [])
        for token_id, candidates in zip(token_ids, positions, strict=True):
            text = self._text(token_id, candidates[token_id] if candidates else None)
            out.text_offset.append(offset)
            out.tokens.append(text)
            offset += len(text)
            if candidates is None:
                out.token_logprobs.append(None)
                out.top_logprobs.append(None)
                continue
            out.token_logprobs.append(_finite(candidates[token_id].logprob))
            kept = list(candidates.items())[: None if exact or num_top == -1 else num_top + 1]
            out.top_logprobs.append({self._text(i, c): _finite(c.logprob) for i, c in kept})
        return out

    def chat(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs], num_top: int, exact: bool = False
    ) -> ChatLogprobs:
        """The chat form; ``top_logprobs`` starts with the sampled token."""
        content = []
        for token_id, candidates in zip(token_ids, positions, strict=True):
            kept = list(candidates.items())[: None if exact or num_top == -1 else num_top]
            own = candidates[token_id]
            top = [ChatTopLogprob(t := self._text(i, c), _finite(c.logprob), self._top_bytes(i, t)) for i, c in kept]
            content.append(
                ChatTokenLogprob(self._text(token_id, own), _finite(own.logprob), self._bytes(token_id), top)
            )
        return ChatLogprobs(content)

    def _text(self, token_id: int, logprob: Logprob | None) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        if logprob is not None and logprob.decoded_token is not None:
            return logprob.decoded_token
        assert self._tokenizer is not None
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def _bytes(self, token_id: int) -> list[int] | None:
        return None if self._tokenizer is None else list(self._tokenizer.token_bytes(token_id))

    def _top_bytes(self, token_id: int, text: str) -> list[int] | None:
        return list(text.encode()) if self._as_ids else self._bytes(token_id)


def prompt_logprobs_json(positions: Sequence[PositionLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """Per prompt token: id as text → logprob, rank and text; None for the first token."""
    if positions is None:
        return None
    return [
        None
        if p is None
        else {
            str(i): {"logprob": _finite(c.logprob), "rank": c.rank, "decoded_token": c.decoded_token}
            for i, c in p.items()
        }
        for p in positions
    ]


def _finite(value: float) -> float:
    return value if value > FLOOR and not math.isnan(value) else FLOOR
