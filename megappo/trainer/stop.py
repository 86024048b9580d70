"""Stopping on a signal: the ranks agree where they are asked, so that none leaves the others in a collective."""

import signal
from types import FrameType

from megappo.parallel.collectives import any_rank
from megappo.parallel.mesh import Mesh


class StopSignal:
    """Remembers SIGTERM and SIGUSR1 (Slurm's warning before a time limit) instead of dying from them."""

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._seen = False
        for number in self.SIGNALS:
            signal.signal(number, self._remember)
        # `launcher/rank.py` holds them back until now, so that one during start-up is kept and not deadly.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.SIGNALS)

    def requested(self) -> bool:
        """Whether any rank was asked to stop; the same answer on every rank. A collective call."""
        return any_rank(self._seen, self._mesh)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._seen = True
