"""The copies of a switch on the device itself: many small ones, made as one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megappo.engines.hybrid.messages import Views


class DeviceCopies:
    """Copies into the first of each pair what is in the second, whenever it is run."""

    def __init__(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._pairs = pairs
        self._graph: torch.cuda.CUDAGraph | None = None
        self.nbytes = sum(target.nbytes for target, _ in pairs)

    def record(self) -> None:
        """On a GPU, after a first run: hundreds of small copies, replayed from then on, cost one launch."""
        if self._graph is None and self._pairs and self._pairs[0][0].is_cuda:
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._write()

    def run(self) -> int:
        """Returns the bytes that were copied."""
        if self._graph is not None:
            self._graph.replay()
        elif self._pairs:
            self._write()
        return self.nbytes

    def _write(self) -> None:
        # In 8 bytes at a time where that is possible: a GPU copies 2-byte numbers at half of its memory's speed.
        by_type: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for target, source in (widened(target, source) for target, source in self._pairs):
            by_type.setdefault(target.dtype, []).append((target, source))
        for several in by_type.values():
            targets, sources = zip(*several, strict=True)
            torch._foreach_copy_(targets, sources)


def widened(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Both as flat int64 views, where they lie in one piece each, begin and end at 8 bytes, and have one type."""
    if target.dtype != source.dtype or target.nbytes % 8:
        return target, source
    if not all(each.is_contiguous() and each.storage_offset() * each.itemsize % 8 == 0 for each in (target, source)):
        return target, source
    return target.flatten().view(torch.int64), source.flatten().view(torch.int64)


def paired(targets: Views, sources: Views) -> list[tuple[Tensor, Tensor]]:
    """(destination, source) of each view; where one side has several, one an expert, the other is cut into as many."""
    if len(targets) != len(sources):
        targets, sources = (each if len(each) > 1 else each[0].split(1) for each in (targets, sources))
    return list(zip(targets, sources, strict=True))
