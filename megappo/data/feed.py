"""The prompts of one step after another, made ready by a thread while the step before computes.

Which prompts they are is the order's (`iterate.py`, `mixture.py`); a checkpoint says where training is, not the thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from megappo.experience.sample import Prompt


class Resumable(Protocol):
    """Where in the prompts a run stands."""

    @property
    def epoch(self) -> int: ...

    @property
    def prompts_seen(self) -> int: ...

    @property
    def steps_per_epoch(self) -> int: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Order(Resumable, Protocol):
    """A resumable order of row numbers."""

    def next_batch(self) -> list[int]: ...


@dataclass(frozen=True)
class _Place:
    """Where the order stands after the batches that were handed out."""

    epoch: int
    prompts_seen: int
    state: dict[str, Any]


class PromptFeed:
    """Batches of prompts in an order. It stands for that order wherever its place is asked for, saved or restored.

    With `ahead`, a thread makes the next batch from the moment that one is taken; the order of prompts, and the place
    that is saved, are the same without it.
    """

    def __init__(self, prompts: Sequence[Prompt], order: Order, *, ahead: bool) -> None:
        self.prompts = prompts
        self._order = order
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prompts") if ahead else None
        self._coming: Future[tuple[list[Prompt], _Place]] | None = None
        self._place = self._here()

    @property
    def epoch(self) -> int:
        return self._place.epoch

    @property
    def prompts_seen(self) -> int:
        """Prompts of all batches that were handed out, whether or not they were trained on."""
        return self._place.prompts_seen

    @property
    def steps_per_epoch(self) -> int:
        return self._order.steps_per_epoch

    def next_batch(self) -> list[Prompt]:
        """The next batch; raises what making it raised."""
        batch, self._place = self._coming.result() if self._coming is not None else self._make()
        if self._thread is not None:
            self._coming = self._thread.submit(self._make)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return self._place.state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a saved place; a batch that was made ahead is dropped."""
        if self._coming is not None:
            self._coming.result()
            self._coming = None
        self._order.load_state_dict(state)
        self._place = self._here()

    def _make(self) -> tuple[list[Prompt], _Place]:
        batch = [self.prompts[row] for row in self._order.next_batch()]
        return batch, self._here()

    def _here(self) -> _Place:
        return _Place(self._order.epoch, self._order.prompts_seen, self._order.state_dict())
