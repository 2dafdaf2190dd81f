"""A small vocabulary, and a model that says any token its grammar allows."""

import random
from collections.abc import Sequence

from vllm_clone.config import StructuredOutputsConfig
from vllm_clone.core.structured_output.grammar import Matcher
from vllm_clone.core.structured_output.spec import GrammarSpec, make_spec
from vllm_clone.core.structured_output.vocabulary import Vocabulary
from vllm_clone.sampling_params import StructuredOutputsParams

EOS, MARK, END_TOO = 256, 257, 258
PIECES = [
    b'{"',
    b'":',
    b'": ',
    b'",',
    b'"}',
    b", ",
    b"12",
    b"ab",
    b"yes",
    b"no",
    b"  ",
    b"\n",
    b"true",
    "é".encode()[:1],
]
PADDING = 19
SIZE = 259 + len(PIECES) + PADDING
"""Not a multiple of 32."""


def vocabulary() -> Vocabulary:
    """Every byte, some longer pieces, two ids that end a text, a special token called <mark>, and padding."""
    return Vocabulary(
        [*(bytes([i]) for i in range(256)), b"", b"", b"", *PIECES, *[b""] * PADDING],
        frozenset({EOS, MARK, END_TOO}),
        {EOS: b"</s>", MARK: b"<mark>", END_TOO: b"<eot>"},
        (EOS,),
        encode,
    )


def encode(text: str) -> list[int]:
    """The longest pieces first."""
    left, ids = text.encode(), []
    while left:
        piece = max((p for p in PIECES if left.startswith(p)), key=len, default=b"")
        ids.append(259 + PIECES.index(piece) if piece else left[0])
        left = left[len(piece) or 1 :]
    return ids


def spec(config: StructuredOutputsConfig | None = None, **params: object) -> GrammarSpec:
    return make_spec(StructuredOutputsParams(**params), config or StructuredOutputsConfig())  # type: ignore[arg-type]


def allowed(matcher: Matcher) -> set[int]:
    """Ids that may come next."""
    words = bytearray(b"\x5a" * (vocabulary().num_words * 4))  # what was there before must not matter
    matcher.fill(memoryview(words))
    return {i for i in range(SIZE) if words[i >> 3] >> (i & 7) & 1}


def say(matcher: Matcher, ids: Sequence[int] | bytes) -> bool:
    """Whether the grammar takes all ids, or those of a text, each of which its mask allows."""
    tokens = encode(ids.decode()) if isinstance(ids, bytes) else ids
    return all(token in allowed(matcher) and matcher.accept(token) for token in tokens)


def ramble(matcher: Matcher, seed: int, limit: int = 400) -> bytes:
    """A text of random allowed tokens up to its end."""
    draw, text, tokens = random.Random(seed), b"", vocabulary().token_bytes
    for _ in range(limit):
        choices = sorted(allowed(matcher))
        assert choices, "the grammar leads nowhere"
        token = EOS if EOS in choices and draw.random() < 0.3 else draw.choice(choices)
        assert matcher.accept(token)
        if matcher.is_terminated:
            return text
        text += tokens[token]
    raise AssertionError(f"no end after {limit} tokens: {text!r}")
