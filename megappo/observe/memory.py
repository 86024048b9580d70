"""The most memory that this process has held: in each phase of a step, and in the run."""

import resource
import sys
from dataclasses import dataclass

import torch


@dataclass
class AbsentBytes:
    """Bytes that torch counts as allocated on this rank's GPU, and that an engine has given back to the device in its
    sleep; `least` since `watch`."""

    now: int = 0
    least: int = 0

    def become(self, nbytes: int) -> None:
        self.now = nbytes
        self.least = min(self.least, nbytes)

    def watch(self) -> None:
        self.least = self.now


class PeakMemory:
    """On a GPU what torch has allocated there, but for what is `absent`; elsewhere resident memory, whose peak cannot
    be told by phase.

    Where an engine wakes or falls asleep within a phase, it counts as awake for all of it.
    """

    def __init__(self, absent: AbsentBytes | None = None) -> None:
        self._before = 0
        self._absent = absent or AbsentBytes()

    def begin_phase(self) -> None:
        """What is held now is the least that the phase will show."""
        if torch.cuda.is_available():
            self._before = self.of_run
            torch.cuda.reset_peak_memory_stats()
            self._absent.watch()

    def metrics(self, phase: str) -> dict[str, float]:
        """`memory/<phase>/peak` in bytes since the phase began, on a GPU."""
        if not torch.cuda.is_available():
            return {}
        return {f"memory/{phase}/peak": float(self._of_phase)}

    @property
    def of_run(self) -> int:
        """Bytes."""
        if torch.cuda.is_available():
            return max(self._before, self._of_phase)
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return kilobytes if sys.platform == "darwin" else kilobytes * 1024

    @property
    def _of_phase(self) -> int:
        return torch.cuda.max_memory_allocated() - self._absent.least
