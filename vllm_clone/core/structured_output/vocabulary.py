"""What grammar libraries need to know of a model's tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_clone.config import VllmConfig
from vllm_clone.errors import ConfigError
from vllm_clone.tokenizers import get_tokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The model's tokens as bytes; those that stand for no text are empty."""

    token_bytes: list[bytes]
    """One entry for each of the model's scores; padding ids and ids the tokenizer lacks are b''."""
    special_ids: frozenset[int]
    """Ids that never are text, though their names may look like some."""
    special_names: dict[int, bytes]
    """What each special id is called, which structural tags may begin or end with."""
    stop_ids: tuple[int, ...]
    """Ids that end a text; never empty."""
    encode: Callable[[str], list[int]]
    """Text → ids, without special tokens around it."""

    @property
    def num_words(self) -> int:
        """32-bit words of a mask."""
        return (len(self.token_bytes) + 31) // 32

    def ends(self, stop_ids: Sequence[int]) -> list[int]:
        """Ids that may come where a grammar may end: the model's own, and those of a request that stand for no text.

        A stop id that is text stays text, which the grammar judges.
        """
        size = len(self.token_bytes)
        return list(dict.fromkeys(i for i in (*self.stop_ids, *stop_ids) if i < size and not self.token_bytes[i]))


def load_vocabulary(config: VllmConfig) -> Vocabulary:
    """The vocabulary of the model's tokenizer, which is read anew: the engine has no other use for it.

    Raises:
        ConfigError: there is no tokenizer, or no token that ends a text.
    """
    model = config.model_config
    tokenizer = get_tokenizer(model.tokenizer_path, model.tokenizer_mode, model.trust_remote_code)
    size = model.vocab_size
    stop_ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    stop_ids = [i for i in dict.fromkeys([*stop_ids, *model.eos_token_ids]) if i < size]
    if not stop_ids:
        raise ConfigError("The model has no token that ends a text, which structured outputs need.")
    special = frozenset(i for i in tokenizer.special_ids | set(stop_ids) if i < size)
    known = range(min(size, tokenizer.vocab_size))
    texts = [b"" if i in special else tokenizer.token_bytes(i) for i in known]
    return Vocabulary(
        texts + [b""] * (size - len(texts)),
        special,
        {i: tokenizer.convert_ids_to_tokens([i])[0].encode() for i in special},
        tuple(stop_ids),
        lambda text: tokenizer.encode(text, add_special_tokens=False),
    )
