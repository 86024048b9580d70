"""Which sequences run in which step, and in which cache slot each lives. Pure Python: identical on every rank.

A step holds one token of every sequence that is decoding, and the whole prompts of newly admitted ones. The active
sequence number i has cache slot i, always: a finished sequence's slot is filled by the last active one, so that the
cache is read as one view, without gathers.
"""

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from megappo.engines.rollout import GenerationRequest


@dataclass(eq=False)
class GeneratedSequence:
    """A request on its way: `index` is its place among the requests, `prompt` the same number for equal prompts."""

    index: int
    prompt: int
    prompt_ids: tuple[int, ...]
    noise_key: int
    max_tokens: int | None = None
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of prompt and response so far. The last of them is not in the cache before it has been decoded."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def last_token(self) -> int:
        return self.token_ids[-1] if self.token_ids else self.prompt_ids[-1]


@dataclass(frozen=True)
class SlotCopy:
    """The first `length` cache positions of slot `source` are to be copied to slot `destination`."""

    source: int
    destination: int
    length: int


@dataclass(frozen=True)
class Step:
    """One forward: `decoding` in slots 0, 1, …, then `prefilling` in the slots after them; each draws one token.

    `forks` bring in further responses to a prompt that is in the cache already: copied after the forward, they decode
    the prompt's last token in the next step, and share the rest of its prefill.
    """

    decoding: tuple[GeneratedSequence, ...]
    prefilling: tuple[GeneratedSequence, ...]
    forks: tuple[SlotCopy, ...]

    @property
    def drawing(self) -> tuple[GeneratedSequence, ...]:
        """The sequences that draw a token, in the order of their slots."""
        return self.decoding + self.prefilling

    @property
    def longest(self) -> int:
        """Cache positions that the step needs in a slot."""
        return max(sequence.length for sequence in self.drawing)


class Schedule:
    """Admits requests in their order as slots fall free.

    At most `max_num_seqs` are active; the padded prompts of one prefill take at most `max_num_batched_tokens` tokens,
    or are a single prompt.
    """

    def __init__(self, requests: Sequence[GenerationRequest], max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._waiting = _waiting(requests)
        self._active: list[GeneratedSequence] = []
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens

    @classmethod
    def several(
        cls, requests: Sequence[GenerationRequest], count: int, max_num_seqs: int, max_num_batched_tokens: int
    ) -> list["Schedule"]:
        """`count` schedules, or as many as can have a sequence, that take their requests from one queue and share the
        `max_num_seqs` slots evenly; prefills are limited in each."""
        num_slots = min(max_num_seqs, len(requests))
        count = min(count, num_slots)
        sizes = [num_slots // count + (number < num_slots % count) for number in range(count)]
        schedules = [cls((), size, max_num_batched_tokens) for size in sizes]
        waiting = _waiting(requests)
        for schedule in schedules:
            schedule._waiting = waiting
        return schedules

    @property
    def max_num_seqs(self) -> int:
        """The slots that it fills."""
        return self._max_num_seqs

    @property
    def is_finished(self) -> bool:
        return not self._active and not self._waiting

    def next_step(self) -> Step:
        """Admits what fits and says what the next forward computes."""
        decoding = tuple(self._active)
        prefilling: list[GeneratedSequence] = []
        sources = {sequence.prompt: slot for slot, sequence in enumerate(decoding)} if self._waiting else {}
        forked: list[GeneratedSequence] = []
        while self._waiting and len(decoding) + len(prefilling) + len(forked) < self._max_num_seqs:
            sequence = self._waiting[0]
            if sequence.prompt in sources:
                forked.append(self._waiting.popleft())
            elif self._fits(prefilling, sequence):
                sources[sequence.prompt] = len(decoding) + len(prefilling)
                prefilling.append(self._waiting.popleft())
            else:
                break
        first_fork = len(decoding) + len(prefilling)
        self._active = [*decoding, *prefilling, *forked]
        # The fork's last prompt token is decoded in its own slot, so one position less is copied.
        forks = tuple(
            SlotCopy(sources[fork.prompt], first_fork + number, len(fork.prompt_ids) - 1)
            for number, fork in enumerate(forked)
        )
        return Step(decoding, tuple(prefilling), forks)

    def _fits(self, prefilling: list[GeneratedSequence], sequence: GeneratedSequence) -> bool:
        """Whether the prompt can join: attention computes prompts padded to the longest, so that is what is limited."""
        longest = max(len(other.prompt_ids) for other in [*prefilling, sequence])
        return not prefilling or longest * (len(prefilling) + 1) <= self._max_num_batched_tokens

    def retire(self, finished: Collection[GeneratedSequence]) -> tuple[SlotCopy, ...]:
        """Takes `finished` out; the copies that fill their slots. Sources and destinations don't overlap."""
        num_left = len(self._active) - len(finished)
        holes = [slot for slot, sequence in enumerate(self._active[:num_left]) if sequence in finished]
        movers = [slot for slot in range(num_left, len(self._active)) if self._active[slot] not in finished]
        moves = tuple(
            # The last token is not in the cache yet.
            SlotCopy(source, hole, self._active[source].length - 1)
            for hole, source in zip(holes, movers, strict=True)
        )
        for move in moves:
            self._active[move.destination] = self._active[move.source]
        del self._active[num_left:]
        return moves


def _waiting(requests: Sequence[GenerationRequest]) -> deque[GeneratedSequence]:
    numbers: dict[tuple[int, ...], int] = {}
    return deque(
        GeneratedSequence(
            index,
            numbers.setdefault(request.prompt_ids, len(numbers)),
            request.prompt_ids,
            request.noise_key,
            request.max_tokens,
        )
        for index, request in enumerate(requests)
    )
