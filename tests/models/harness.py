"""Run a model through its paged cache with block tables made by hand, without scheduler and runner."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm_clone.attention import AttentionMetadata, ForwardContext
from vllm_clone.config.groups import LoadConfig, ModelConfig
from vllm_clone.config.kv_cache import KVCacheGroup
from vllm_clone.config.vllm import VllmConfig
from vllm_clone.model_loader import load_model
from vllm_clone.models.base import CausalLM
from vllm_clone.worker.graphs import RecordedForward
from vllm_clone.worker.step_inputs import StepInputs

CPU = torch.device("cpu")


def config_for(
    path: Path,
    hf_config: dict[str, Any],
    *,
    dtype: str = "float32",
    max_model_len: int = 512,
    load_format: Any = "auto",
) -> VllmConfig:
    """What the engine would resolve for the checkpoint at ``path``."""
    model = ModelConfig(
        model=str(path),
        path=str(path),
        hf_config=hf_config,
        architecture=hf_config["architectures"][0],
        vocab_size=hf_config["vocab_size"],
        dtype=dtype,  # type: ignore[arg-type]
        max_model_len=max_model_len,
    )
    return VllmConfig(model_config=model, load_config=LoadConfig(load_format=load_format, use_tqdm_on_load=False))


class PagedModel:
    """A model with a small KV cache whose blocks are handed out in a scattered order.

    Args:
        model: a loaded model; its attention layers get caches of ``num_blocks`` blocks.
        block_size: tokens per block.
        num_blocks: block 0 is never used, as in the engine.
        recorded: replay a recording of the forward pass, as the engine does.
    """

    def __init__(self, model: CausalLM, *, block_size: int = 8, num_blocks: int = 64, recorded: bool = False) -> None:
        self.model = model
        self.block_size = block_size
        self.layers = model.attention_layers()
        for layer in self.layers.values():
            spec = layer.kv_cache_spec(block_size, str(layer.dtype).removeprefix("torch."))
            shape = layer.backend.kv_cache_shape(num_blocks, spec)
            # Not a number wherever nothing was stored: a read outside a sequence shows up in its logits.
            layer.kv_cache = torch.full(shape, float("nan"), dtype=layer.dtype)
        generator = torch.Generator().manual_seed(0)
        self.free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
        self.recorded: RecordedForward | None = None
        if recorded:
            group = KVCacheGroup(
                tuple(self.layers), next(iter(self.layers.values())).kv_cache_spec(block_size, "float32")
            )
            longest = block_size * (num_blocks - 1)
            self.recorded = RecordedForward(model, [group], longest, 4, longest)
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    @torch.inference_mode()
    def step(self, rows: dict[str, Sequence[int]]) -> dict[str, torch.Tensor]:
        """Append tokens to sequences, all in one forward pass; new names begin a sequence.

        Returns:
            For each sequence the float32 logits [tokens given, V] that follow each of them.
        """
        ids, positions, slots, starts = [], [], [], [0]
        for name, tokens in rows.items():
            begin = self.lengths.setdefault(name, 0)
            table = self.tables.setdefault(name, [])
            while len(table) * self.block_size < begin + len(tokens):
                table.append(self.free.pop())
            for position, token in enumerate(tokens, begin):
                ids.append(token)
                positions.append(position)
                slots.append(table[position // self.block_size] * self.block_size + position % self.block_size)
            self.lengths[name] = begin + len(tokens)
            starts.append(len(ids))
        hidden = self.forward(ids, positions, self.metadata(list(rows), starts, slots))
        pieces = self.model.compute_logits(hidden).split([b - a for a, b in pairwise(starts)])
        return dict(zip(rows, pieces, strict=True))

    def forward(self, ids: list[int], positions: list[int], step: AttentionMetadata) -> torch.Tensor:
        """Hidden states of one step."""
        if self.recorded is None:
            ctx = ForwardContext({name: layer.backend.plan(step) for name, layer in self.layers.items()})
            return self.model(torch.tensor(ids), torch.tensor(positions), ctx)
        inputs = StepInputs(
            rows=np.arange(len(step.seq_lens_R)),
            input_ids_T=np.array(ids),
            positions_T=np.array(positions),
            query_start_loc_R1=step.query_start_loc_R1.numpy(),
            seq_lens_R=step.seq_lens_R.numpy(),
            slot_mappings=[step.slot_mapping_T.numpy()],
            block_tables=[step.block_table_RB.numpy()],
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            sampling=None,
        )
        return self.recorded(inputs)

    def metadata(self, names: list[str], starts: list[int], slots: list[int]) -> AttentionMetadata:
        """One step over the sequences ``names``, whose tokens begin at ``starts`` and are stored at ``slots``."""
        seq_lens = [self.lengths[name] for name in names]
        width = max(len(self.tables[name]) for name in names)
        tables = [self.tables[name] + [0] * (width - len(self.tables[name])) for name in names]
        return AttentionMetadata(
            query_start_loc_R1=torch.tensor(starts, dtype=torch.int32),
            seq_lens_R=torch.tensor(seq_lens, dtype=torch.int32),
            block_table_RB=torch.tensor(tables, dtype=torch.int32),
            slot_mapping_T=torch.tensor(slots, dtype=torch.int64),
            max_query_len=max(b - a for a, b in pairwise(starts)),
            max_seq_len=max(seq_lens),
            num_actual_tokens=len(slots),
        )

    def logits(self, tokens: Sequence[int], *, chunk: int = 0) -> torch.Tensor:
        """Logits after every token of one sequence, computed in chunks of ``chunk`` tokens (0: all at once)."""
        name = f"sequence {len(self.tables)}"
        size = chunk or len(tokens)
        return torch.cat([self.step({name: tokens[i : i + size]})[name] for i in range(0, len(tokens), size)])


def load(path: Path, hf_config: dict[str, Any], **options: Any) -> CausalLM:
    """Load a checkpoint as the worker does."""
    return load_model(config_for(path, hf_config, **options), CPU)
