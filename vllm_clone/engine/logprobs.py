"""Scores with the text of their tokens."""

from collections.abc import Sequence

from vllm_clone.messages import LogprobRows
from vllm_clone.outputs import Logprob, PositionLogprobs
from vllm_clone.tokenizers.base import Tokenizer

REPLACEMENT = "\ufffd"
MAX_CONTEXT = 4
"""Earlier tokens that may belong to the same character."""


class TokenTexts:
    """The text single tokens stand for, remembered per id. Shared by all requests of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def of(self, token_id: int, before: Sequence[int]) -> str:
        """Text of a token that follows ``before``; '' while it ends within a character."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self._alone(token_id)
        if text.endswith(REPLACEMENT):
            return self._in_context(token_id, before)
        return text

    def _alone(self, token_id: int) -> str:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        raw = self._tokenizer.convert_ids_to_tokens([token_id])[0]
        # Decoders of SentencePiece vocabularies drop the space that starts a text.
        return " " + text if raw.startswith("▁") and not text.startswith(" ") else text

    def _in_context(self, token_id: int, before: Sequence[int]) -> str:
        for count in range(1, min(MAX_CONTEXT, len(before)) + 1):
            context = list(before[-count:])
            whole = self._tokenizer.decode([*context, token_id], skip_special_tokens=False)
            if whole.endswith(REPLACEMENT):
                continue
            known = self._tokenizer.decode(context, skip_special_tokens=False).rstrip(REPLACEMENT)
            if whole.startswith(known):
                return whole[len(known) :]
        return ""


def position_logprobs(
    rows: LogprobRows, index: int, texts: TokenTexts | None, before: Sequence[int]
) -> PositionLogprobs:
    """Row ``index`` by token id: the row's own token first, then the top; ``before`` are the ids in front of it."""
    ids, scores = rows.token_ids[index], rows.logprobs[index]
    entries: PositionLogprobs = {}
    rank = rows.ranks[index]
    for position, (token, score) in enumerate(zip(ids, scores, strict=True)):
        text = texts.of(token, before) if texts is not None else None
        entries[token] = Logprob(score, position or rank, text)
    return entries


def prompt_logprobs(
    rows: LogprobRows | None, prompt_token_ids: Sequence[int], texts: TokenTexts | None
) -> list[PositionLogprobs | None]:
    """One entry per prompt token; the first has none."""
    entries: list[PositionLogprobs | None] = [None]
    for index in range(len(rows.token_ids) if rows is not None else 0):
        assert rows is not None
        before = prompt_token_ids[max(index + 1 - MAX_CONTEXT, 0) : index + 1]
        entries.append(position_logprobs(rows, index, texts, before))
    return entries
