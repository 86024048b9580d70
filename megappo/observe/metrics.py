"""Numbers of a step: the seconds of its phases, and means over its optimizer steps.

Writing them is in `trackers.py`.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager


class Stopwatch:
    """Measures the phases of one step: `with clock.phase("rollout"):` adds to `time/rollout`, in seconds."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._start = now()
        self._phases: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time of the block, also where it raises."""
        start = self._now()
        try:
            yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + self._now() - start

    def times(self) -> dict[str, float]:
        """`time/<phase>` of each phase in order, and `time/step` since the watch was made."""
        return {f"time/{name}": seconds for name, seconds in self._phases.items()} | {
            "time/step": self._now() - self._start
        }


def mean_of(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each metric over the updates that report it, in order of first appearance."""
    values: dict[str, list[float]] = {}
    for update in updates:
        for name, value in update.items():
            values.setdefault(name, []).append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


class Remaining:
    """Estimates the seconds until the last step from the mean of the steps seen so far, the first apart.

    The first step of a process is slower than the rest (allocations, compilation), so it counts only while alone.
    """

    def __init__(self, total_steps: int) -> None:
        self._total_steps = total_steps
        self._first: float | None = None
        self._sum = 0.0
        self._count = 0

    def after(self, step: int, seconds: float) -> float:
        """Seconds left after `step`, which took `seconds`."""
        if self._first is None:
            self._first = seconds
            return (self._total_steps - step) * seconds
        self._sum += seconds
        self._count += 1
        return (self._total_steps - step) * self._sum / self._count
