"""Requests of a recorded trace: their times, lengths, and which blocks of tokens they share."""

import numpy as np

from vllm_clone.benchmarks.serve.datasets.request import Request, field
from vllm_clone.benchmarks.serve.sample import Sample
from vllm_clone.errors import ConfigError


def timed_trace(request: Request) -> list[Sample]:
    """``timed_trace``: each hash id stands for a block of random ids, the same wherever it occurs."""
    flags = request.flags
    chunk, unit = flags["timed_trace_chunk_hash_size"], flags["timed_trace_sec_multiplier"]
    names = {
        key: flags[f"timed_trace_label_{key}"] for key in ("timestamp", "input_length", "output_length", "hash_ids")
    }
    vocabulary = request.words.vocab_size
    blocks: dict[str, list[int]] = {}

    def block(hash_id: object) -> list[int]:
        key = str(hash_id)
        if key not in blocks:
            seed = [request.seed, *key.encode()]
            blocks[key] = np.random.default_rng(seed).integers(0, vocabulary, size=chunk).tolist()
        return blocks[key]

    samples = []
    for where, row in request.lines():
        length = field(where, row, names["input_length"], int)
        ids = [i for hash_id in field(where, row, names["hash_ids"], list) for i in block(hash_id)][:length]
        if len(ids) < length:
            raise ConfigError(f"--dataset-path {where}: {length} tokens need more blocks of {chunk} than it has.")
        when = float(field(where, row, names["timestamp"], (int, float))) * unit
        samples.append(Sample(ids, length, field(where, row, names["output_length"], int), timestamp=when))
        if len(samples) == request.count:
            break
    return sorted(samples, key=lambda s: s.timestamp or 0.0)
