"""A GPU in turns: torch keeps for later what training has freed, and an engine takes its own memory behind torch."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import torch

from megappo.engines.rollout import HeldBytes
from megappo.errors import ConfigError
from megappo.observe.memory import AbsentBytes

MARGIN = 0.01
"""Of the GPU's memory, left free by the share that is proposed: contexts and fragments differ from turn to turn."""
ROUNDING = 1e-9
"""What a share may lie under a hundredth and still be that."""


class DeviceTurns:
    """Makes room for an engine that takes memory of this rank's GPU past torch's allocator, and gives it back between
    its turns. `share` is its `rollout.gpu_memory_utilization`; None for engines that take none, where nothing is done.
    """

    def __init__(self, share: float | None) -> None:
        self._share = share
        self._needed: int | None = None
        self.absent = AbsentBytes()

    @contextlib.contextmanager
    def waking(self) -> Iterator[None]:
        """While inside, the engine takes its memory. Blocks that torch keeps go back to the device first where the rest
        is less than the engine took last time: giving them back costs time, and training has to get them again.

        Raises ConfigError, with the share that would do, where it is not enough."""
        if self._share is None:
            yield
            return
        if self._needed is None or free_bytes() < self._needed:
            torch.cuda.empty_cache()
        free = free_bytes()
        try:
            yield
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise
            raise ConfigError(self._refusal(self._share, free)) from error

    def has_woken(self, held: HeldBytes) -> None:
        """`held` as the engine has measured it in this turn."""
        if self._share is not None:
            self._needed = held.awake - held.asleep
            self.absent.become(0)

    def sleeps(self) -> None:
        """The engine has given its memory back."""
        if self._needed is not None:
            self.absent.become(self._needed)

    def _refusal(self, share: float, free: int) -> str:
        total = torch.cuda.mem_get_info()[1]
        less = "let training keep less between its turns (actor.offload and critic.offload, docs/memory.md)"
        problem = f"rollout.gpu_memory_utilization: {share:g}, but the GPU has no room for vLLM to generate"
        if self._needed is None:
            return f"{problem}: {gib(free)} of {gib(total)} are free; set it lower, or {less}"
        enough = math.floor(100 * (share - (self._needed - free) / total - MARGIN) + ROUNDING) / 100
        way_out = f"set it to {enough:g}, or {less}" if enough > 0 else less
        return f"{problem}: it needs {gib(self._needed)}, and training leaves {gib(free)} of {gib(total)}; {way_out}"


def free_bytes() -> int:
    """Of this rank's GPU, for whoever takes them."""
    return int(torch.cuda.mem_get_info()[0])


def gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"
