"""A model that remembers tokens through the real KV cache, and a scheduler that does whatever a test says.

The fake model stores each token's id in its slot and reads them back through the block table, so a wrong slot,
block, position, length or row shows as a wrong token. Its logits depend on every token that a full layer and a
sliding layer may attend to.
"""

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import torch

from tests.sample import reference
from vllm_clone.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm_clone.config.kv_cache import FullAttentionSpec, KVCacheConfig, SlidingWindowSpec, group_layers
from vllm_clone.sampling_params import SamplingParams
from vllm_clone.step import ModelRunnerOutput, NewRequest, RunningRequests, SchedulerOutput
from vllm_clone.worker.model_runner import ModelRunner

VOCAB = 50
WINDOW = 6
BLOCK_SIZE = 4
MODULUS = 1_000_003
CPU = torch.device("cpu")


def digest(tokens):
    """A number below MODULUS that depends on every token and its distance from the end."""
    value = 7
    for token in tokens:
        value = (value * 31 + int(token) + 1) % MODULUS
    return value


def logits_of(full_digest, window_digest):
    """Scores in [0, 6) that look random and depend on both digests."""
    v = np.arange(VOCAB, dtype=np.int64)
    mixed = (full_digest * 8191 + window_digest * 131 + v * 524_287) % MODULUS
    return ((mixed * mixed % MODULUS) / MODULUS * 6).astype(np.float32)


def next_logits(tokens):
    """What the model answers after ``tokens``."""
    return logits_of(digest(tokens), digest(tokens[-WINDOW:]))


def expected_token(tokens, num_prompt, params):
    """The token the semantics ask for after ``tokens``, by plain per-row Python."""
    row = next_logits(tokens).tolist()
    prompt, outputs = tokens[:num_prompt], tokens[num_prompt:]
    if params.allowed_token_ids is not None:
        row = [x if v in params.allowed_token_ids else -math.inf for v, x in enumerate(row)]
    for v, bias in (params.logit_bias or {}).items():
        row[v] += bias
    if len(outputs) < params.min_tokens:
        for v in params.stop_set:
            row[v] = -math.inf
    row = reference.penalise(
        row, prompt, outputs, params.repetition_penalty, params.frequency_penalty, params.presence_penalty
    )
    for word in params.bad_words_token_ids:
        if len(word) == 1 or outputs[-(len(word) - 1) :] == word[:-1]:
            row[word[-1]] = -math.inf
    if params.is_greedy:
        return max(range(VOCAB), key=lambda v: row[v])
    row = [x / params.temperature for x in row]
    kept = reference.survivors(row, k=params.top_k, p=params.top_p, min_prob=params.min_p)
    return reference.draw(row, kept, params.seed, len(tokens) - 1)


class FakeBackend:
    @staticmethod
    def kv_cache_shape(num_blocks, spec):
        return (num_blocks, 2, spec.num_kv_heads, spec.block_size, spec.head_size)

    def plan(self, step):
        return step


class FakeAttention:
    backend = FakeBackend()

    def __init__(self, window):
        self.window = window
        self.kv_cache = None

    def kv_cache_spec(self, block_size, dtype):
        if self.window:
            return SlidingWindowSpec(block_size, 1, 1, dtype, self.window)
        return FullAttentionSpec(block_size, 1, 1, dtype)


class FakeModel:
    """Hidden state = (digest of all tokens so far, digest of the last WINDOW)."""

    def __init__(self):
        self.layers = {"full": FakeAttention(0), "sliding": FakeAttention(WINDOW)}
        self.num_logits_rows = 0
        self.num_tokens = 0

    def attention_layers(self):
        return self.layers

    def __call__(self, input_ids, positions, ctx):
        self.num_tokens += len(input_ids)
        assert input_ids.dtype == positions.dtype == torch.int64
        return torch.stack([self._attend(name, input_ids, positions, ctx) for name in self.layers], dim=1)

    def _attend(self, name, input_ids, positions, ctx):
        layer, meta = self.layers[name], ctx.metadata[name]
        assert meta.block_table_RB.dtype == meta.seq_lens_R.dtype == meta.query_start_loc_R1.dtype == torch.int32
        assert meta.slot_mapping_T.dtype == torch.int64
        assert meta.num_actual_tokens == len(input_ids)
        keys = layer.kv_cache[:, 0, 0, :, 0]
        blocks, offsets = meta.slot_mapping_T // BLOCK_SIZE, meta.slot_mapping_T % BLOCK_SIZE
        assert (blocks > 0).all(), "block 0 is never written"
        keys[blocks, offsets] = input_ids.float()
        starts, lengths = meta.query_start_loc_R1.tolist(), meta.seq_lens_R.tolist()
        assert meta.max_seq_len == max(lengths)
        assert meta.max_query_len == max(b - a for a, b in itertools.pairwise(starts))
        hidden = []
        for row, length in enumerate(lengths):
            table = meta.block_table_RB[row].long()
            history = keys[table].flatten().tolist()
            for t in range(starts[row], starts[row + 1]):
                end = int(positions[t]) + 1
                assert end == length - (starts[row + 1] - 1 - t)
                begin = max(0, end - layer.window) if layer.window else 0
                hidden.append(digest(history[begin:end]))
        return torch.tensor(hidden, dtype=torch.int64)

    def compute_logits(self, hidden):
        self.num_logits_rows += len(hidden)
        return torch.from_numpy(np.stack([logits_of(full, window) for full, window in hidden.tolist()]))


def make_config(max_num_seqs=8, logprobs_mode="raw_logprobs"):
    return VllmConfig(
        model_config=ModelConfig(dtype="float32", max_model_len=200, vocab_size=VOCAB, logprobs_mode=logprobs_mode),
        cache_config=CacheConfig(block_size=BLOCK_SIZE, kv_cache_dtype="float32"),
        scheduler_config=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=4096),
    )


@dataclass
class Sequence:
    """A request as a test's scheduler sees it."""

    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    num_computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    in_batch: bool = False

    @property
    def outputs(self):
        return self.tokens[self.num_prompt :]

    @property
    def pending(self):
        return len(self.tokens) - self.num_computed


class Driver:
    """Plays the scheduler: the test decides who computes how much; the driver keeps blocks and history."""

    def __init__(self, *, num_blocks=400, max_num_seqs=8, logprobs_mode="raw_logprobs"):
        self.model = FakeModel()
        self.runner = ModelRunner(make_config(max_num_seqs, logprobs_mode), self.model, CPU)
        self.kv_cache = KVCacheConfig(num_blocks, group_layers(self.runner.kv_cache_specs()))
        self.runner.initialize_kv_cache(self.kv_cache)
        self.free = list(range(1, num_blocks))
        self.sequences: dict[str, Sequence] = {}
        self.finished: set[str] = set()
        self.preempted: set[str] = set()

    def add(self, req_id, prompt, params=None):
        self.sequences[req_id] = Sequence(list(prompt), len(prompt), params or SamplingParams(temperature=0))

    def finish(self, req_id):
        self._release(self.sequences.pop(req_id))
        self.finished.add(req_id)

    def preempt(self, req_id):
        sequence = self.sequences[req_id]
        self._release(sequence)
        if sequence.in_batch:
            self.preempted.add(req_id)
        sequence.in_batch, sequence.num_computed = False, 0

    def step(self, counts=None) -> ModelRunnerOutput:
        """Compute ``counts`` tokens per request; all that is pending of every request when not given."""
        if counts is None:
            counts = {req_id: sequence.pending for req_id, sequence in self.sequences.items()}
        output = self.runner.execute(self._schedule(counts))
        for req_id, count in counts.items():
            sequence = self.sequences[req_id]
            sequence.num_computed += count
            assert (req_id in output.sampled_token_ids) == (sequence.pending == 0)
            sequence.tokens += output.sampled_token_ids.get(req_id, [])
        assert set(output.sampled_token_ids) <= set(counts)
        return output

    def _schedule(self, counts):
        new, running = [], RunningRequests()
        for req_id, count in counts.items():
            sequence = self.sequences[req_id]
            blocks = self._grow(sequence, sequence.num_computed + count)
            if sequence.in_batch:
                running.req_ids.append(req_id)
                running.new_block_ids.append(blocks if any(blocks) else None)
                running.num_computed_tokens.append(sequence.num_computed)
            else:
                sequence.in_batch = True
                tokens = sequence.tokens.copy()
                new.append(NewRequest(req_id, tokens, sequence.num_prompt, sequence.params, blocks, 0))
        step = SchedulerOutput(new, running, dict(counts), sum(counts.values()), self.finished, self.preempted)
        self.finished, self.preempted = set(), set()
        return step

    def _grow(self, sequence, num_tokens):
        added = []
        sequence.blocks = sequence.blocks or [[] for _ in self.kv_cache.groups]
        for blocks in sequence.blocks:
            missing = -(-num_tokens // BLOCK_SIZE) - len(blocks)
            added.append([self.free.pop() for _ in range(missing)])
            blocks += added[-1]
        return tuple(added)

    def _release(self, sequence):
        for blocks in sequence.blocks:
            self.free = blocks + self.free[::2] + self.free[1::2]  # any order will do
        sequence.blocks = []


def check(sequence: Sequence):
    """Every output token is the one that the tokens before it call for."""
    for n in range(sequence.num_prompt, len(sequence.tokens)):
        assert sequence.tokens[n] == expected_token(sequence.tokens[:n], sequence.num_prompt, sequence.params), n
