"""Text of one sequence, token by token, up to a stop string."""

from collections.abc import Sequence

from vllm_clone.sampling_params import SamplingParams
from vllm_clone.tokenizers.base import DecodeStream, Tokenizer


class Detokenizer:
    """Collects ids and text of one sequence.

    Without a tokenizer, or with ``detokenize`` off, it collects ids alone and the text stays empty.

    Attributes:
        token_ids: every output id, up to the one that completed a stop string.
        text: everything decoded so far, cut at a stop string; see :meth:`released` for what may be shown.
    """

    def __init__(self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self._stop = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        hold_back = bool(params.stop) and not params.include_stop_str_in_output
        self._held_back = max(map(len, params.stop)) - 1 if hold_back else 0
        self._free_text = 0
        """Length of the text of the first ``min_tokens`` tokens, in which nothing stops."""
        self._stream: DecodeStream | None = None
        if tokenizer is not None and params.detokenize:
            self._stream = tokenizer.new_decode_stream(
                prompt_token_ids, params.skip_special_tokens, params.spaces_between_special_tokens
            )

    def update(self, new_ids: Sequence[int], ended_by_token: bool) -> str | None:
        """Take in new ids; the stop string they complete, if any.

        ``ended_by_token``: the last id is EOS or a stop id, whose text shows only with
        ``include_stop_str_in_output``.
        """
        if self._stream is None:
            self.token_ids += new_ids
            return None
        for position, token in enumerate(new_ids, 1):
            self.token_ids.append(token)
            if ended_by_token and position == len(new_ids) and not self._include_stop:
                return None
            piece = self._stream.step(token)
            if not piece:
                continue
            self.text += piece
            if len(self.token_ids) <= self._min_tokens:
                self._free_text = len(self.text)
            elif self._stop:
                found = self._find_stop(len(piece))
                if found is not None:
                    return found
        return None

    def released(self, finished: bool) -> int:
        """Number of characters that may be shown: all when finished, else those that cannot start a stop string."""
        return len(self.text) if finished else max(len(self.text) - self._held_back, 0)

    def _find_stop(self, num_new: int) -> str | None:
        """Cut the text at the stop string that ends first and reaches into the last ``num_new`` characters."""
        best: tuple[int, str] | None = None
        fresh = min(num_new, len(self.text) - self._free_text)
        for stop in self._stop:
            start = self.text.find(stop, max(len(self.text) - fresh - len(stop) + 1, 0))
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), stop)
        if best is None:
            return None
        end, stop = best
        self.text = self.text[: end if self._include_stop else end - len(stop)]
        return stop
