"""Prompts out of random tokens, of exact length after they went through text and back."""

import math

import numpy as np

from vllm_clone.benchmarks.serve.datasets.request import Request
from vllm_clone.benchmarks.serve.options import range_ratios
from vllm_clone.benchmarks.serve.sample import Sample
from vllm_clone.errors import ConfigError
from vllm_clone.tokenizers import Tokenizer

MAX_TRIES = 10
"""Of cutting and padding a prompt until its text has the length asked for."""
MAX_DRAWS = 50


class PromptMaker:
    """Texts of a given number of tokens, special ones that the tokenizer adds not counted."""

    def __init__(self, tokenizer: Tokenizer, random: np.random.Generator) -> None:
        self._tokenizer = tokenizer
        self._random = random
        barred = tokenizer.special_ids | tokenizer.added_ids
        self.allowed = np.array([i for i in range(tokenizer.vocab_size) if i not in barred])
        self.inexact = 0
        """Texts that no number of tries brought to their length."""

    def draw(self, count: int) -> list[int]:
        return [int(i) for i in self.allowed[self._random.integers(0, len(self.allowed), size=count)]]

    def _draw_whole(self) -> int:
        """A token that stands for whole characters, if a few draws find one."""
        for _ in range(MAX_DRAWS):
            (token,) = self.draw(1)
            if "\ufffd" not in self._tokenizer.decode([token], skip_special_tokens=False):
                break
        return token

    def text_of(self, ids: list[int]) -> tuple[str, int]:
        """A text of ``len(ids)`` tokens that begins like these ids, and its length as found."""
        wanted = len(ids)
        for spare in range(MAX_TRIES):
            text = self._tokenizer.decode(ids, skip_special_tokens=False)
            ids = self._tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == wanted:
                return text, wanted
            if len(ids) > wanted:  # a cut may split a character, which then takes more tokens than it had
                ids = ids[: max(wanted - spare, 0)]
            ids += [self._draw_whole() for _ in range(wanted - len(ids))]
        text = self._tokenizer.decode(ids, skip_special_tokens=False)
        found = len(self._tokenizer.encode(text, add_special_tokens=False))
        self.inexact += found != wanted
        return text, found

    def report(self, request: Request) -> None:
        if self.inexact:
            request.warn(f"WARNING: {self.inexact} prompts miss the length asked for by a few tokens.")


def random_prompts(request: Request) -> list[Sample]:
    """``random``: runs of consecutive vocabulary entries from a random one on, behind a shared random prefix."""
    flags, tokenizer = request.flags, request.words
    random = np.random.default_rng(request.seed)
    maker = PromptMaker(tokenizer, random)
    specials = len(tokenizer.encode(""))
    input_ratio, output_ratio = range_ratios(flags["random_range_ratio"])
    inputs = _bounds(flags["random_input_len"] - specials, input_ratio, 0)
    outputs = _bounds(flags["random_output_len"], output_ratio, 1)
    request.warn(f"Input lengths are drawn from {list(inputs)}, output lengths from {list(outputs)}.")
    prefix = maker.draw(flags["random_prefix_len"])
    input_lens = random.integers(inputs[0], inputs[1] + 1, size=request.count)
    output_lens = random.integers(outputs[0], outputs[1] + 1, size=request.count)
    offsets = random.integers(0, len(maker.allowed), size=request.count)
    samples = []
    for i, (length, output, offset) in enumerate(zip(input_lens, output_lens, offsets, strict=True)):
        run = maker.allowed[(offset + i + np.arange(length)) % len(maker.allowed)]
        text, found = maker.text_of(prefix + run.tolist())
        samples.append(Sample(text, found + specials, int(output)))
    maker.report(request)
    return samples


def _bounds(length: int, ratio: float, least: int) -> tuple[int, int]:
    low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
    return max(low, least), max(high, least)


def prefix_repetition(request: Request) -> list[Sample]:
    """``prefix_repetition``: each random prefix in front of as many random suffixes, in random order.

    A remainder of prompts per prefix is left out.
    """
    flags = request.flags
    prefixes = flags["prefix_repetition_num_prefixes"]
    each = request.count // prefixes
    if not each:
        raise ConfigError(f"--num-prompts {request.count}: fewer than --prefix-repetition-num-prefixes {prefixes}.")
    random = np.random.default_rng(request.seed)
    maker = PromptMaker(request.words, random)
    specials = len(request.words.encode(""))
    samples = []
    for _ in range(prefixes):
        prefix = maker.draw(flags["prefix_repetition_prefix_len"])
        text, _found = maker.text_of(prefix)
        for _ in range(each):
            suffix, _found = maker.text_of(maker.draw(flags["prefix_repetition_suffix_len"]))
            prompt = text + suffix
            length = len(request.words.encode(prompt, add_special_tokens=False)) + specials
            samples.append(Sample(prompt, length, flags["prefix_repetition_output_len"]))
    maker.report(request)
    return request.shuffled(samples)
