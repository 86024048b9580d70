"""The most memory that this process has held: in each phase of a step, and in the run."""

import resource
import sys

import torch


class PeakMemory:
    """On a GPU what torch has allocated there; elsewhere resident memory, whose peak cannot be told by phase."""

    def __init__(self) -> None:
        self._before = 0

    def begin_phase(self) -> None:
        """What is held now is the least that the phase will show."""
        if torch.cuda.is_available():
            self._before = self.of_run
            torch.cuda.reset_peak_memory_stats()

    def metrics(self, phase: str) -> dict[str, float]:
        """`memory/<phase>/peak` in bytes since the phase began, on a GPU."""
        if not torch.cuda.is_available():
            return {}
        return {f"memory/{phase}/peak": float(torch.cuda.max_memory_allocated())}

    @property
    def of_run(self) -> int:
        """Bytes."""
        if torch.cuda.is_available():
            return max(self._before, torch.cuda.max_memory_allocated())
        kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return kilobytes if sys.platform == "darwin" else kilobytes * 1024
