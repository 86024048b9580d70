"""Host memory in slabs, of which what waits there has its places.

torch rounds every block of pinned memory up to a power of two: a block for each tensor would pin up to twice what is
kept. Slabs are powers of two themselves, and one behind the other a run of bytes in which nothing is left between the
places but their alignment. A place that reaches over the end of a slab is in two pieces.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

GIB = 1 << 30
LARGEST = GIB
"""Bytes of a slab where there is enough for one: what one owner gives up then is of the size that another one takes."""
SMALLEST = 4096  # bytes; memory is pinned by the page
FLOOR = 64 << 20
"""Bytes below which no slab is made, where a slab of this size is little beside what is kept."""
ALIGNMENT = 512  # bytes between the beginnings of two places, as torch's blocks on the device

Place = tuple[Tensor, ...]
"""uint8 views of slabs; their bytes one after the other are those of what waits there."""


def pinned_slab(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def pageable_slab(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


class HostSlabs:
    """The slabs of one owner: they go when it and the places are gone."""

    def __init__(self, new_slab: Callable[[int], Tensor]) -> None:
        """`new_slab(num_bytes)` makes a uint8 tensor of so many bytes, a power of two."""
        self._new_slab = new_slab
        self._slabs: list[Tensor] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of all slabs, whether something waits in them or not."""
        return sum(slab.nbytes for slab in self._slabs)

    def places(self, sizes: Sequence[int]) -> list[Place]:
        """A place for each of `sizes`, in bytes. All earlier places are given up.

        As long as the sum of the sizes stays about the same, so do the slabs: pinned memory takes long to get.
        """
        self._fit(sum(aligned(size) for size in sizes))
        ends = list(accumulate(slab.nbytes for slab in self._slabs))
        places, start = [], 0
        for size in sizes:
            places.append(tuple(self._pieces(ends, start, start + size)))
            start += aligned(size)
        return places

    def _fit(self, needed: int) -> None:
        """Slabs for `needed` bytes, and at most a sixteenth or a page more."""
        surplus = self.num_bytes - needed
        if surplus < 0:
            self._slabs += [self._new_slab(size) for size in slab_sizes(-surplus)]
        elif surplus > max(SMALLEST, needed // 16):
            missing = Counter(slab_sizes(needed))
            held, self._slabs = self._slabs, []
            for slab in held:
                if missing[slab.nbytes]:
                    missing[slab.nbytes] -= 1
                    self._slabs.append(slab)
            self._slabs += [self._new_slab(size) for size in missing.elements()]

    def _pieces(self, ends: Sequence[int], start: int, end: int) -> Iterator[Tensor]:
        """The views of bytes `start` to `end` of the run of all slabs, which end at `ends`."""
        number = bisect_right(ends, start)
        while start < end:
            slab, stop = self._slabs[number], min(end, ends[number])
            first = start - ends[number] + slab.nbytes
            yield slab[first : first + stop - start]
            start, number = stop, number + 1


def slab_sizes(num_bytes: int) -> list[int]:
    """Powers of two whose sum is at least `num_bytes`, and at most a sixteenth or a page more; the largest first."""
    floor = max(SMALLEST, min(FLOOR, power_of_two_within(num_bytes // 16)))
    sizes, left = [], num_bytes
    while left > 0:
        sizes.append(max(floor, min(LARGEST, power_of_two_within(left))))
        left -= sizes[-1]
    return sizes


def power_of_two_within(number: int) -> int:
    """The largest power of two that is not above `number`; 0 of 0."""
    return 1 << number.bit_length() >> 1


def aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
