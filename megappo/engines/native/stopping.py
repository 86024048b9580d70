"""When a response ends: end tokens, stop strings, the token limit."""

from collections.abc import Callable, Sequence

from megappo.engines.rollout import SamplingParams
from megappo.experience.sample import FinishReason

# The most tokens that one character of a stop string can take: the bytes of a character in UTF-8.
TOKENS_PER_CHARACTER = 4


class StopRule:
    """Says after each token whether a response is complete.

    `decode` turns token ids into text without special tokens. A stop string is looked for in the tail that it can fill,
    so that a token costs the same early and late in a response; it may lie across tokens.
    """

    def __init__(
        self, sampling: SamplingParams, eos_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
    ) -> None:
        self._end_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)}
        self._max_tokens = sampling.max_tokens
        self._stop = sampling.stop
        self._decode = decode
        # One token more than the longest stop string can fill: tokenizers treat the first token of a text differently.
        self._tail = 1 + TOKENS_PER_CHARACTER * max(map(len, self._stop), default=0)

    def reason(self, token_ids: Sequence[int], max_tokens: int | None = None) -> FinishReason | None:
        """Why the response `token_ids` ends with its last token; None where it goes on. `max_tokens` is its own."""
        if token_ids[-1] in self._end_ids:
            return "stop"
        if self._stop and self._ends_on_string(token_ids[-self._tail :]):
            return "stop"
        return "length" if len(token_ids) >= (max_tokens or self._max_tokens) else None

    def _ends_on_string(self, tail: Sequence[int]) -> bool:
        text = self._decode(tail)
        return any(stop in text for stop in self._stop)
