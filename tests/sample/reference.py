"""Sampling as the semantics read, one row and one token at a time, in plain Python. The oracle of these tests."""

import math

MASK_64 = (1 << 64) - 1
MASK_32 = (1 << 32) - 1


def penalise(row, prompt_ids, output_ids, repetition, frequency, presence):
    result = list(row)
    for token, x in enumerate(row):
        count = output_ids.count(token)
        if token in prompt_ids or count:
            x = x / repetition if x > 0 else x * repetition
        result[token] = x - frequency * count - (presence if count else 0.0)
    return result


def softmax(row):
    top = max(row)
    weights = [math.exp(x - top) for x in row]
    return [w / math.fsum(weights) for w in weights]


def min_p(row, p):
    probs = softmax(row)
    return {v for v, q in enumerate(probs) if q >= p * max(probs)}


def top_k(row, k):
    if k <= 0 or k >= len(row):
        return set(range(len(row)))
    kth = sorted(row, reverse=True)[k - 1]
    return {v for v, x in enumerate(row) if x >= kth}


def top_p(row, p):
    """Drop, lightest first, while the dropped mass (the token's own included) stays within 1 − p."""
    probs = softmax(row)
    kept, total = set(), 0.0
    order = sorted(range(len(row)), key=lambda v: probs[v])
    for v in order:
        total += probs[v]
        if total > 1 - p:
            kept.add(v)
    return kept | {order[-1]}


def survivors(row, *, k=0, p=1.0, min_prob=0.0):
    """Tokens left by min-p, then top-k, then top-p."""
    for keep in (
        lambda r: min_p(r, min_prob),
        lambda r: top_k(r, k),
        lambda r: top_p(r, p) if p < 1 else range(len(r)),
    ):
        kept = keep(row)
        row = [x if v in kept else -math.inf for v, x in enumerate(row)]
    return {v for v, x in enumerate(row) if x > -math.inf}


def _mix_64(x):
    x = (x + 0x9E3779B97F4A7C15) & MASK_64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK_64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK_64
    return x ^ (x >> 31)


def exponential(seed, position, token):
    """Noise of one token, from integers of unlimited size."""
    keys = _mix_64(_mix_64(seed & MASK_64) ^ position)
    h = (token * 0x9E3779B1 + (keys & MASK_32)) & MASK_32
    h ^= h >> 16
    h = h * 0x7FEB352D & MASK_32
    h ^= h >> 15
    h = (h + (keys >> 32)) * 0x846CA68B & MASK_32
    h ^= h >> 16
    u = min(((h & 0x7FFFFFFF) + 0.5) * 2.0**-31, 1 - 2.0**-24)
    return -math.log1p(-u)


def draw(row, kept, seed, position):
    return max(kept, key=lambda v: row[v] - math.log(exponential(seed, position, v)))


def log_softmax(row):
    top = max(row)
    total = top + math.log(math.fsum(math.exp(x - top) for x in row))
    return [x - total for x in row]
