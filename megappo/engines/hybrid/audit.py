"""Checks a rank's plan against its definition: every row placed once, none moved twice. Imports no torch."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

from megappo.engines.hybrid.plan import Planner
from megappo.engines.hybrid.targets import real_length
from megappo.engines.hybrid.transfers import Transfer

Key = TypeVar("Key", bound=Hashable)


class PlanError(AssertionError):
    """A plan that does not do what a plan has to; the message names parameter and rows."""


@dataclass(frozen=True, slots=True)
class _Area:
    """Rows `start` … `stop - 1` of experts `first` … `last - 1`; a parameter without experts counts as one expert."""

    first: int
    last: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return (self.last - self.first) * (self.stop - self.start)

    def before(self, row: int) -> "_Area":
        """What of it lies before row `row`."""
        return _Area(self.first, self.last, min(self.start, row), min(self.stop, row))

    def overlaps(self, other: "_Area") -> bool:
        return (
            self.first < other.last and other.first < self.last and self.start < other.stop and other.start < self.stop
        )


class Auditor:
    """Checks the plans of ranks one after the other. Layers repeat: what one has passed is not checked again."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._disjoint: set[tuple[_Area, ...]] = set()

    def check(self, rank: int, transfers: Sequence[Transfer]) -> None:
        """Raises PlanError where a row of a generation parameter has no source or two (rows beyond the
        end of the model's vocabulary may lack one), or a training row is taken twice."""
        placed = _areas(transfers, lambda each: (each.target, each.layer), _placed)
        for target in self._planner.targets.of(rank):
            real, num_experts = real_length(self._planner.kinds, target), len(target.experts or (0,))
            for layer in target.layers:
                areas = placed.pop((target.name, layer), ())
                self._require_disjoint(areas, f"rank {rank}: {target.name}, layer {layer}: two sources for")
                is_whole = sum(area.before(real).size for area in areas) == num_experts * real
                if not is_whole or any(area.stop > target.length for area in areas):
                    raise PlanError(f"rank {rank}: {target.name}, layer {layer}: {areas} are not all of its rows")
        if placed:
            raise PlanError(
                f"rank {rank}: transfers to parameters that it does not have: {sorted(map(str, placed))[:3]}"
            )
        taken = _areas(transfers, lambda each: (each.source, each.layer, each.source_rank), _taken)
        for (source, layer, _), areas in taken.items():
            self._require_disjoint(areas, f"rank {rank}: {source}, layer {layer}: taken twice:")

    def _require_disjoint(self, areas: tuple[_Area, ...], what: str) -> None:
        if areas in self._disjoint:
            return
        for one, other in combinations(areas, 2):
            if one.overlaps(other):
                raise PlanError(f"{what} {one} and {other}")
        self._disjoint.add(areas)


def _areas(
    transfers: Sequence[Transfer], key: Callable[[Transfer], Key], area: Callable[[Transfer], _Area]
) -> dict[Key, tuple[_Area, ...]]:
    areas: dict[Key, list[_Area]] = {}
    for transfer in transfers:
        areas.setdefault(key(transfer), []).append(area(transfer))
    return {name: tuple(several) for name, several in areas.items()}


def _placed(transfer: Transfer) -> _Area:
    run, start = transfer.experts, transfer.target_offset
    first, count = (0, 1) if run is None else (run.target_place, run.count)
    return _Area(first, first + count, start, start + transfer.length)


def _taken(transfer: Transfer) -> _Area:
    run, start = transfer.experts, transfer.source_offset
    first, count = (0, 1) if run is None else (run.first, run.count)
    return _Area(first, first + count, start, start + transfer.length)
