"""The forward pass recorded once and replayed without Python. T tokens, R requests, B blocks, D hidden."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from vllm_clone import kernels
from vllm_clone.attention import AttentionMetadata, ForwardContext
from vllm_clone.config.kv_cache import KVCacheGroup, cdiv
from vllm_clone.kernels.arena import Arena
from vllm_clone.logger import init_logger
from vllm_clone.models.base import CausalLM
from vllm_clone.worker.step_inputs import StepInputs

logger = init_logger(__name__)


class NotRecordableError(Exception):
    """The forward pass computes something that a tape does not see."""


_READS = frozenset({"__bool__", "__float__", "__index__", "__int__", "__setitem__", "item", "numpy", "tolist"})


class _OnlyViews(TorchFunctionMode):
    """Refuses what torch would compute itself while a tape records: it would be missing from every replay."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        in_place = name.startswith("__i") if name.endswith("__") else name.endswith("_")
        if in_place or name in _READS or "out" in kwargs:
            raise NotRecordableError(f"the model calls torch's {name}")
        result = func(*args, **kwargs)
        made = result if isinstance(result, (tuple, list)) else (result,)
        known = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if any(isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known for x in made):
            raise NotRecordableError(f"the model calls torch's {name}")
        return result


class StaticInputs:
    """Inputs of a forward pass at fixed addresses, for steps of up to a number of tokens and requests."""

    def __init__(self, max_tokens: int, max_requests: int, groups: Sequence[KVCacheGroup], max_model_len: int) -> None:
        self.input_ids_T, self.positions_T = np.zeros(max_tokens, np.int64), np.zeros(max_tokens, np.int64)
        self.query_start_loc_R1 = np.zeros(max_requests + 1, np.int32)
        self.seq_lens_R = np.zeros(max_requests, np.int32)
        self.slot_mappings = [np.full(max_tokens, -1, np.int64) for _ in groups]
        # Wide enough for the longest request; pages that no request reaches cost no memory.
        self.block_tables = [
            np.zeros((max_requests, cdiv(max_model_len, group.spec.block_size)), np.int32) for group in groups
        ]

    def fill(self, step: StepInputs) -> tuple[int, int]:
        """Copy a step in; its numbers of tokens and requests."""
        num_tokens, num_requests = len(step.input_ids_T), len(step.seq_lens_R)
        self.input_ids_T[:num_tokens] = step.input_ids_T
        self.positions_T[:num_tokens] = step.positions_T
        self.query_start_loc_R1[: num_requests + 1] = step.query_start_loc_R1
        self.seq_lens_R[:num_requests] = step.seq_lens_R
        for slots, source in zip(self.slot_mappings, step.slot_mappings, strict=True):
            slots[:num_tokens] = source
        for table, blocks in zip(self.block_tables, step.block_tables, strict=True):
            table[:num_requests, : blocks.shape[1]] = blocks
        return num_tokens, num_requests

    def context(self, groups: Sequence[KVCacheGroup], max_model_len: int) -> ForwardContext:
        """Metadata that points at these inputs, at their full size."""
        by_layer = {}
        for group, table, slots in zip(groups, self.block_tables, self.slot_mappings, strict=True):
            metadata = AttentionMetadata(
                query_start_loc_R1=torch.from_numpy(self.query_start_loc_R1),
                seq_lens_R=torch.from_numpy(self.seq_lens_R),
                block_table_RB=torch.from_numpy(table),
                slot_mapping_T=torch.from_numpy(slots),
                max_query_len=len(self.input_ids_T),
                max_seq_len=max_model_len,
                num_actual_tokens=len(self.input_ids_T),
            )
            by_layer.update(dict.fromkeys(group.layer_names, metadata))
        return ForwardContext(by_layer)


class RecordedForward:
    """A model's forward pass as one list of kernel calls, good for every step up to the recorded size.

    Nothing is computed while recording, so it costs the Python of one step. All intermediates live in one arena.

    Raises:
        NotRecordableError: the model calls torch for something, or the platform's kernels cannot be recorded.
    """

    def __init__(
        self,
        model: CausalLM,
        groups: Sequence[KVCacheGroup],
        max_tokens: int,
        max_requests: int,
        max_model_len: int,
    ) -> None:
        if kernels.Tape is None:
            raise NotRecordableError("the compiled kernels are missing")
        self._inputs = inputs = StaticInputs(max_tokens, max_requests, groups, max_model_len)
        self._arena = Arena()
        self._tape = kernels.Tape(max_tokens, max_requests, self._arena)
        ids_T, positions_T = torch.from_numpy(inputs.input_ids_T), torch.from_numpy(inputs.positions_T)
        context = inputs.context(groups, max_model_len)
        with torch.inference_mode(), self._tape.record(), _OnlyViews():
            self._hidden_TD = model(ids_T, positions_T, context)

    @property
    def num_calls(self) -> int:
        """Kernel calls of one forward pass."""
        return len(self._tape)

    def __call__(self, step: StepInputs) -> torch.Tensor:
        """Hidden states [T, D] of a step; they stand in memory that the next step overwrites."""
        num_tokens, num_requests = self._inputs.fill(step)
        self._tape.run(num_tokens, num_requests)
        return self._hidden_TD[:num_tokens]
