"""The order of prompts of several sets, mixed in fixed proportions; within a set, the order is that of `iterate.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from megappo.data.iterate import PromptOrder
from megappo.errors import DataError


@dataclass(frozen=True)
class SetSize:
    """One set as the mixture sees it: its rows follow those of the set before it."""

    name: str
    num_prompts: int
    weight: float


class MixedOrder:
    """Yields row numbers in which every set has its share of any number of prompts, to within one prompt or so.

    Prompt after prompt, the set that is farthest behind its share is next, the first among equals; a set that is
    through begins again in another order. Depends on sizes, weights and seed alone.
    """

    def __init__(self, sets: Sequence[SetSize], batch_size: int, seed: int, shuffle: bool = True) -> None:
        self._sets = list(sets)
        self._batch_size = batch_size
        total = sum(Fraction(one.weight) for one in sets)
        # Exact, so that the millionth prompt comes from the same set on every machine.
        self._shares = [Fraction(one.weight) / total for one in sets]
        self._starts = [sum(one.num_prompts for one in self._sets[:number]) for number in range(len(self._sets))]
        self._orders = [
            PromptOrder(one.num_prompts, 1, seed + number, shuffle) for number, one in enumerate(self._sets)
        ]
        self._counts = [0] * len(self._sets)

    @property
    def epoch(self) -> int:
        """How many times as many prompts as there are have been drawn; a set has an own pace."""
        return self.prompts_seen // sum(one.num_prompts for one in self._sets)

    @property
    def prompts_seen(self) -> int:
        return sum(self._counts)

    @property
    def steps_per_epoch(self) -> int:
        """Steps that draw as many prompts as there are."""
        return max(1, sum(one.num_prompts for one in self._sets) // self._batch_size)

    def next_batch(self) -> list[int]:
        """Row numbers of the next step's prompts; a set with fewer than its share of a step gives some twice."""
        return [self._next() for _ in range(self._batch_size)]

    def state_dict(self) -> dict[str, Any]:
        return {
            one.name: {"weight": one.weight, "drawn": count, "order": order.state_dict()}
            for one, count, order in zip(self._sets, self._counts, self._orders, strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint; DataError where the sets, their weights or the seed have changed since."""
        now = {one.name: one.weight for one in self._sets}
        saved = {name: entry["weight"] for name, entry in state.items() if isinstance(entry, Mapping)}
        if saved != now:
            raise DataError(
                f"the checkpoint mixes the prompt sets {saved or 'of no data.sets'}, this run {now} (name: weight): "
                "resume with the same data.sets, or start a new run"
            )
        for number, one in enumerate(self._sets):
            self._orders[number].load_state_dict(state[one.name]["order"])
            self._counts[number] = state[one.name]["drawn"]

    def _next(self) -> int:
        drawn = self.prompts_seen + 1
        behind = [share * drawn - count for share, count in zip(self._shares, self._counts, strict=True)]
        number = max(range(len(behind)), key=lambda place: (behind[place], -place))
        self._counts[number] += 1
        (row,) = self._orders[number].next_batch()
        return self._starts[number] + row
