"""The interface of every text generation model."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import nn

from vllm_clone.attention import ForwardContext
from vllm_clone.layers.attention import Attention
from vllm_clone.layers.embedding import VocabParallelEmbedding, softcap_
from vllm_clone.layers.options import BuildOptions
from vllm_clone.models.checkpoint import WeightTable
from vllm_clone.models.config import HFConfig


class CausalLM(nn.Module, ABC):
    """Tokens in, hidden states out; hidden states in, logits out."""

    weight_table: ClassVar[WeightTable]
    """How the family's checkpoints name what this model holds."""
    lm_head: VocabParallelEmbedding
    tied: bool
    """The logits head is the token embedding; a checkpoint's own head is then ignored."""
    logit_cap: float = 0.0

    @abstractmethod
    def __init__(self, hf_config: HFConfig, options: BuildOptions) -> None:
        """Build with uninitialised weights. Raises ModelLoadError when config.json cannot be served."""
        super().__init__()

    @abstractmethod
    def forward(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, ctx: ForwardContext) -> torch.Tensor:
        """Token ids and positions, int64 [T] → hidden states after the last norm, [T, D] in the model's dtype.

        Writes the keys and values of the T tokens to the caches of the attention layers.
        """

    def build_head(self, embedding: VocabParallelEmbedding, tied: bool, options: BuildOptions) -> None:
        """Set ``lm_head``: the token embedding itself when tied, else a matrix of its size."""
        self.tied = tied
        self.lm_head = (
            embedding if tied else VocabParallelEmbedding(embedding.vocab_size, embedding.in_features, options)
        )

    def compute_logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [R, V], of the rows of ``hidden_RD``: pass only rows that are sampled or scored."""
        return softcap_(self.lm_head.logits(hidden_RD), self.logit_cap)

    def attention_layers(self) -> dict[str, Attention]:
        """The layers that keep a KV cache, by name, in the order of execution."""
        return {m.layer_name: m for m in self.modules() if isinstance(m, Attention)}
