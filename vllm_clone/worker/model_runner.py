"""One step on one device: batch → inputs → model → logits → tokens. R rows, T tokens, D hidden, V vocabulary."""

from functools import partial

import numpy as np
import torch

from vllm_clone.attention import AttentionMetadata, ForwardContext
from vllm_clone.config import VllmConfig
from vllm_clone.config.kv_cache import KVCacheConfig, KVCacheSpec, as_full_attention, cdiv
from vllm_clone.logger import init_logger
from vllm_clone.messages import LogprobRows
from vllm_clone.models.base import CausalLM
from vllm_clone.sample import Sampler
from vllm_clone.sample.logits_processor import ProcessorChain
from vllm_clone.sample.logprobs import score_tokens
from vllm_clone.sampling_params import SamplingParams
from vllm_clone.step import GrammarMasks, ModelRunnerOutput, NewRequest, RunningRequests, SchedulerOutput
from vllm_clone.worker.grammar_rows import GrammarRows
from vllm_clone.worker.graphs import NotRecordableError, RecordedForward
from vllm_clone.worker.input_batch import InputBatch
from vllm_clone.worker.kv_cache import PagesAhead, bind_kv_cache
from vllm_clone.worker.step_inputs import StepInputs, prepare

logger = init_logger(__name__)

_LOGITS_BYTES = 16 << 20
"""Logits are made and used in slices of at most this size. Larger ones would leave the C library's heap, and their
pages would be faulted in anew in every step: 256 rows of 49,152 took 45 ms in one piece and take 25 ms in four."""
_WARM_UP_ID = "warm-up"


class ModelRunner:
    """Owns the model, the KV cache and the batch. The same runner serves every device."""

    def __init__(self, config: VllmConfig, model: CausalLM, device: torch.device) -> None:
        self.model = model
        self.layers = model.attention_layers()
        self._config = config
        self._device = device
        self._sampler = Sampler(config.model_config.logprobs_mode)
        named = config.model_config.logits_processors
        self._processors = ProcessorChain(named, config, device) if named else None
        self._logits_rows = max(1, _LOGITS_BYTES // (4 * config.model_config.vocab_size))
        self._groups: list[tuple[str, ...]] = []
        self._recorded: RecordedForward | None = None
        self._pages: PagesAhead | None = None
        self._only_decode = config.compilation_config.cudagraph_mode == "FULL_DECODE_ONLY"
        self.batch = InputBatch(0, 0, [], 0)

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """What each attention layer stores, by layer name."""
        cache = self._config.cache_config
        assert cache.block_size is not None
        specs = {
            name: layer.kv_cache_spec(cache.block_size, cache.kv_cache_dtype) for name, layer in self.layers.items()
        }
        alike = self._config.scheduler_config.disable_hybrid_kv_cache_manager
        return {name: as_full_attention(spec) for name, spec in specs.items()} if alike else specs

    def initialize_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        """Allocate the pool, bind it to the layers, and start with an empty batch."""
        tensors = bind_kv_cache(self.layers, kv_cache, self._device)
        if self._device.type == "cpu" and tensors:
            self._pages = PagesAhead(tensors, kv_cache.num_blocks * kv_cache.groups[0].spec.block_size)
        self._groups = [group.layer_names for group in kv_cache.groups]
        max_num_seqs = self._config.scheduler_config.max_num_seqs
        assert max_num_seqs is not None
        block_sizes = [group.spec.block_size for group in kv_cache.groups]
        model_config = self._config.model_config
        self.batch = InputBatch(max_num_seqs, model_config.vocab_size, block_sizes, model_config.seed)
        self._record(kv_cache)

    def warm_up(self) -> None:
        """Run a tiny prefill and a decode, so the first request does not pay for what is set up lazily.

        Uses block 1 of every group, whose content nobody relies on yet.
        """
        blocks = tuple([1] for _ in self._groups)
        prompt = NewRequest(_WARM_UP_ID, [0, 0], 2, SamplingParams(), blocks, 0)
        self.execute(SchedulerOutput([prompt], RunningRequests(), {_WARM_UP_ID: 2}, 2))
        running = RunningRequests([_WARM_UP_ID], [None], [2])
        self.execute(SchedulerOutput([], running, {_WARM_UP_ID: 1}, 1))
        self.batch.update(SchedulerOutput([], RunningRequests(), {}, 0, finished_req_ids={_WARM_UP_ID}))

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Compute a step's tokens; requests whose last known token was computed get one more."""
        batch = self.batch
        batch.update(step)
        if not step.total_num_scheduled_tokens:
            return ModelRunnerOutput({})
        inputs = prepare(batch, step)
        if self._pages is not None:
            self._pages.used(max(int(slots.max()) for slots in inputs.slot_mappings))
        replays = self._replays(inputs)
        hidden_TD = self._forward(inputs)
        output = ModelRunnerOutput({}, replayed=replays)
        if batch.has_prompt_logprobs:
            output.prompt_logprobs = self._score_prompts(inputs, hidden_TD)
        self._sample(inputs, hidden_TD, output, step.grammar)
        return output

    def use_idle_time(self) -> bool:
        """Do a few milliseconds of what can be done ahead of requests; whether there is more."""
        return self._pages is not None and self._pages.provide()

    def _replays(self, inputs: StepInputs) -> bool:
        recorded = self._recorded
        fits = recorded is not None and recorded.fits(inputs)
        return fits and (inputs.max_query_len == 1 or not self._only_decode)

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        """Hidden states [T, D]."""
        if self._recorded is not None and self._replays(inputs):
            return self._recorded(inputs)
        context = ForwardContext(self._metadata(inputs))
        return self.model(self._tensor(inputs.input_ids_T), self._tensor(inputs.positions_T), context)

    def _record(self, kv_cache: KVCacheConfig) -> None:
        """Record the forward pass, unless that is not wanted or not possible."""
        self._recorded = None
        model, scheduler = self._config.model_config, self._config.scheduler_config
        compilation = self._config.compilation_config
        if model.enforce_eager or compilation.cudagraph_mode == "NONE" or compilation.max_cudagraph_capture_size == 0:
            return
        max_tokens = compilation.max_cudagraph_capture_size or scheduler.max_num_batched_tokens
        max_requests = scheduler.max_num_seqs
        assert max_tokens is not None
        assert max_requests is not None
        assert isinstance(model.max_model_len, int)
        try:
            self._recorded = RecordedForward(self.model, kv_cache.groups, max_tokens, max_requests, model.max_model_len)
        except NotRecordableError as error:
            logger.info("Steps run through Python, not from a recording: %s", error)
        else:
            logger.info("Recorded the forward pass: %d kernel calls", self._recorded.num_calls)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device, non_blocking=True)

    def _metadata(self, inputs: StepInputs) -> dict[str, AttentionMetadata]:
        """Attention metadata by layer; groups differ in blocks and slots alone."""
        start_R1, seq_lens_R = self._tensor(inputs.query_start_loc_R1), self._tensor(inputs.seq_lens_R)
        by_layer = {}
        for names, table, slots in zip(self._groups, inputs.block_tables, inputs.slot_mappings, strict=True):
            metadata = AttentionMetadata(
                query_start_loc_R1=start_R1,
                seq_lens_R=seq_lens_R,
                block_table_RB=self._tensor(table),
                slot_mapping_T=self._tensor(slots),
                max_query_len=inputs.max_query_len,
                max_seq_len=inputs.max_seq_len,
                num_actual_tokens=len(inputs.input_ids_T),
            )
            by_layer.update(dict.fromkeys(names, self.layers[names[0]].backend.plan(metadata)))
        return by_layer

    def _sample(
        self, inputs: StepInputs, hidden_TD: torch.Tensor, output: ModelRunnerOutput, grammar: GrammarMasks | None
    ) -> None:
        """Draw tokens for the rows that have computed all they know, and append them."""
        batch, places = self.batch, inputs.sampling
        rows, positions_R, hidden_RD = inputs.rows, inputs.positions_T, hidden_TD
        if places is not None:
            if not len(places):
                return
            rows = rows[places]
            positions_R = inputs.seq_lens_R[places].astype(np.int64) - 1
            hidden_RD = hidden_TD[self._tensor(inputs.query_start_loc_R1[1:][places].astype(np.int64) - 1)]
        token_ids: list[int] = []
        logprobs: dict[int, LogprobRows] = {}
        num_slices = 1 if self._processors is not None else cdiv(len(rows), self._logits_rows)
        if self._processors is not None:
            self._processors.update(batch.requests)
        size = cdiv(len(rows), num_slices)
        masks = None if grammar is None else GrammarRows(grammar, batch.rows_of(grammar.req_ids), rows)
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            wanted = None if places is None and num_slices == 1 else rows[part]
            logits_RV = self.model.compute_logits(hidden_RD[part])
            wishes = batch.sampling.select(wanted, positions_R[part])
            if masks is not None:
                wishes.bitmask = masks.part(start, start + size)
            if self._processors is not None:
                all_greedy = wishes.temperature_R is None
                whole = len(rows) == len(batch) and bool((rows == np.arange(len(rows))).all())
                wishes.custom = partial(self._processors.apply, rows_R=None if whole else rows, all_greedy=all_greedy)
            sampled = self._sampler(logits_RV, wishes)
            token_ids += sampled.token_ids
            logprobs |= {start + i: scores for i, scores in sampled.logprobs.items()}
        req_ids = batch.append_sampled(rows, token_ids)
        output.sampled_token_ids = {req_id: [token] for req_id, token in zip(req_ids, token_ids, strict=True)}
        output.logprobs = {req_ids[i]: scores for i, scores in logprobs.items()}

    def _score_prompts(self, inputs: StepInputs, hidden_TD: torch.Tensor) -> dict[str, LogprobRows]:
        """Scores of the prompt tokens that follow this step's positions, for requests that want them."""
        batch, result = self.batch, {}
        for i, row in enumerate(inputs.rows.tolist()):
            request = batch.requests[row]
            num_top = request.num_prompt_logprobs
            if num_top is None:
                continue
            end = int(inputs.seq_lens_R[i])
            first, last = inputs.query_start_loc_R1[i : i + 2].tolist()
            start, num_prompt = end - (last - first), len(request.prompt_ids)
            stop = min(end, num_prompt - 1)
            if stop > start:
                targets = request.prompt_ids[start + 1 : stop + 1]
                result[request.req_id] = self._score(hidden_TD[first : first + stop - start], targets, num_top)
            if end >= num_prompt:
                request.num_prompt_logprobs = None
                batch.has_prompt_logprobs -= 1
        return result

    def _score(self, hidden_TD: torch.Tensor, targets_T: np.ndarray, num_top: int) -> LogprobRows:
        """Log-probabilities that each position gives to its target and to its best tokens."""
        size = self._logits_rows
        table = LogprobRows([], [], [])
        for start in range(0, len(hidden_TD), size):
            logits = self.model.compute_logits(hidden_TD[start : start + size])
            targets = self._tensor(targets_T[start : start + size])
            part = score_tokens(logits, targets, num_top)
            table.token_ids += part.token_ids
            table.logprobs += part.logprobs
            table.ranks += part.ranks
        return table
