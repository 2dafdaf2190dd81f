"""One token per row of logits, by the row's own rules. R rows, V vocabulary, E rows that want logprobs."""

from dataclasses import dataclass
from functools import cached_property

import torch

from vllm_clone.messages import LogprobRows
from vllm_clone.sample import adjust
from vllm_clone.sample.batch import SamplingBatch
from vllm_clone.sample.logprobs import LogprobsMode, ScoreTable, score_wishes


@dataclass(frozen=True)
class SamplerOutput:
    """Sampled ids, and the scores of the rows that asked for them. Lists are made when they are first read."""

    ids_R: torch.Tensor
    """int64, on the device of the logits."""
    scored_rows: list[int]
    """Rows that have scores, in the order of ``scores``."""
    scores: ScoreTable | None

    @cached_property
    def token_ids(self) -> list[int]:
        """Sampled ids by row."""
        ids: list[int] = self.ids_R.tolist()
        return ids

    @cached_property
    def logprobs(self) -> dict[int, LogprobRows]:
        """Scores by row."""
        if self.scores is None:
            return {}
        table = self.scores.rows()
        columns = zip(self.scored_rows, table.token_ids, table.logprobs, table.ranks, strict=True)
        return {row: LogprobRows([ids], [values], [rank]) for row, ids, values, rank in columns}


class Sampler:
    """Greedy and random sampling. A step costs only what some row of it uses.

    Order: grammar, allowed ids, logit bias, min_tokens, processors of the user's own, penalties, bad words,
    temperature, min-p, top-k, top-p, draw.
    """

    def __init__(self, logprobs_mode: LogprobsMode = "raw_logprobs") -> None:
        self._raw = logprobs_mode.startswith("raw")
        self._logprobs = logprobs_mode.endswith("logprobs")

    def __call__(self, logits_RV: torch.Tensor, batch: SamplingBatch) -> SamplerOutput:
        """Sample every row.

        Args:
            logits_RV: float32; may be changed in place.
            batch: one entry per row of the logits.
        """
        if batch.bitmask is not None:
            adjust.allow_bits(logits_RV, batch.bitmask)
        scored_RV, scored_rows = logits_RV, [wish.row for wish in batch.logprobs]
        places = scored_rows
        if scored_rows and self._raw and batch.has_edits:
            scored_RV, places = logits_RV[scored_rows], list(range(len(scored_rows)))
        _edit(logits_RV, batch)
        ids_R = adjust.kernels_for(logits_RV).sample_tokens(
            logits_RV, batch.temperature_R, batch.top_k_R, batch.top_p_R, batch.min_p_R, batch.seeds_R,
            batch.positions_R, keep=bool(scored_rows) and not self._raw,
        )  # fmt: skip
        if not scored_rows:
            return SamplerOutput(ids_R, [], None)
        tokens_E = ids_R if scored_rows == list(range(batch.num_rows)) else ids_R[scored_rows]
        scores = score_wishes(scored_RV, places, tokens_E, batch.logprobs, self._logprobs)
        return SamplerOutput(ids_R, scored_rows, scores)


def _edit(logits_RV: torch.Tensor, batch: SamplingBatch) -> None:
    if batch.allowed:
        adjust.allow_only(logits_RV, batch.allowed)
    if batch.bias:
        adjust.add_bias(logits_RV, batch.bias, batch.bias_values)
    if batch.min_tokens:
        # A grammar that allows nothing but the end of the text has the last word.
        adjust.mask(logits_RV, batch.min_tokens, unless_last=True)
    if batch.custom is not None:
        batch.custom(logits_RV)
    if batch.penalised:
        adjust.penalise(logits_RV, batch.penalised)
    if batch.bad_words:
        adjust.mask(logits_RV, batch.bad_words)
