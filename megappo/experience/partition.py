"""Dividing numbers into parts whose sums are close: sequences over ranks, or over micro-batches. Pure arithmetic."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Part = tuple[int, tuple[int, ...]]
"""(sum of the costs, their places)."""


def balanced_parts(costs: Sequence[int], num_parts: int, *, equal_sizes: bool = False) -> list[list[int]]:
    """Places of `costs` in `num_parts` parts whose sums are close, each part ascending, parts in the order of their
    first places; parts without any come last. The answer depends on the costs alone.

    The largest differencing method (Karmarkar & Karp 1982) for several parts: of two partial divisions that differ
    most inside, the larger parts of one join the smaller of the other. With `equal_sizes` all parts have as many
    places, which `num_parts` must divide (Michiels et al. 2003: it begins with one of each `num_parts` next in size).
    """
    order = sorted(range(len(costs)), key=lambda place: (-costs[place], place))
    width = num_parts if equal_sizes else 1
    assert len(costs) % width == 0, f"{len(costs)} costs can't make {num_parts} parts of one size"
    divisions: list[list[Part]] = [
        [(costs[place], (place,)) for place in order[start : start + width]] + [(0, ())] * (num_parts - width)
        for start in range(0, len(order), width)
    ]
    # The number breaks ties, so that no tuple of places is compared.
    heap = [(_spread(division), number, division) for number, division in enumerate(divisions)]
    heapq.heapify(heap)
    for number in range(len(divisions), 2 * len(divisions) - 1):
        merged = _merged(heapq.heappop(heap)[2], heapq.heappop(heap)[2])
        heapq.heappush(heap, (_spread(merged), number, merged))
    parts = heap[0][2] if heap else [(0, ())] * num_parts
    return sorted((sorted(places) for _, places in parts), key=lambda places: places[0] if places else len(costs))


def _spread(division: list[Part]) -> int:
    """Minus the difference of the largest and the smallest sum: the heap gives the smallest first."""
    return division[-1][0] - division[0][0]


def _merged(one: list[Part], other: list[Part]) -> list[Part]:
    """Both are sorted, the largest sum first; so is the result."""
    pairs = zip(one, reversed(other), strict=True)
    return sorted(((a + b, (*places, *more)) for (a, places), (b, more) in pairs), key=lambda part: -part[0])


def parts_within(costs: Sequence[int], limit: int) -> list[list[int]]:
    """`balanced_parts` of the fewest parts, from total / limit on, that it finds sums of at most `limit` for."""
    assert not costs or max(costs) <= limit, f"a cost of {max(costs)} is over the limit of {limit} on its own"
    num_parts = -(-sum(costs) // limit)
    while True:
        parts = balanced_parts(costs, num_parts)
        if all(sum(costs[place] for place in places) <= limit for places in parts):
            return parts
        num_parts += 1
