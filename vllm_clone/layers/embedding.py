"""Token embeddings and the logits head, both rows of a matrix [vocabulary, hidden] divided among the ranks."""

import torch

from vllm_clone import kernels
from vllm_clone.layers.linear import LinearBase, Part
from vllm_clone.layers.options import BuildOptions
from vllm_clone.layers.weights import WeightModule


class VocabParallelEmbedding(LinearBase):
    """Each rank holds an equal range of token ids (the last may hold fewer).

    The same object is the logits head of models with tied embeddings.
    """

    def __init__(self, vocab_size: int, hidden_size: int, options: BuildOptions) -> None:
        tp = options.tp
        per_rank = -(-vocab_size // tp.size)
        start = min(per_rank * tp.rank, vocab_size)
        self.tp = tp
        self.vocab_size = vocab_size
        self.per_rank = per_rank
        part = Part(vocab_size, start, min(per_rank, vocab_size - start))
        super().__init__(Part.whole(hidden_size), {None: part}, False, options)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Token ids [T] → embeddings [T, D], float32."""
        if self.tp.size == 1:
            return self.method.embed(self, ids_T)
        vocab = self.outputs[None]
        local = ids_T - vocab.start
        elsewhere = (local < 0) | (local >= vocab.size)
        out_TD = self.method.embed(self, local.masked_fill(elsewhere, 0))
        return self.tp.reduce(out_TD.masked_fill_(elsewhere[:, None], 0))

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Scores over the whole vocabulary, float32 [R, V], for hidden states [R, D]."""
        logits = self.method.logits(self, hidden_RD)
        if self.tp.size > 1:
            short = self.per_rank - self.out_features
            logits = self.tp.gather(torch.nn.functional.pad(logits, (0, short)))[:, : self.vocab_size]
        return logits


class PositionEmbedding(WeightModule):
    """A learned vector per position, held whole by every rank."""

    weight: torch.Tensor

    def __init__(self, num_positions: int, hidden_size: int, options: BuildOptions) -> None:
        super().__init__()
        self.declare("weight", (num_positions, hidden_size), options)

    def forward(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Positions [T] → vectors [T, D]."""
        return kernels.embedding(self.weight, positions_T)


def softcap_(logits_RV: torch.Tensor, cap: float) -> torch.Tensor:
    """cap × tanh(logits / cap), in place; a cap of 0 changes nothing."""
    return logits_RV if cap == 0 else logits_RV.div_(cap).tanh_().mul_(cap)
