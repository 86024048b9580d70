"""What the generation layout holds on a rank: the native engine's parameters. Imports no torch.

vLLM's parameters are in `engines/vllm/targets.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megappo.config.grid import GenerationGrid
from megappo.engines.hybrid.kinds import Kind, Kinds, shard_segments
from megappo.models.weight_map import Segment, WeightClass


@dataclass(frozen=True)
class Target:
    """A parameter of many layers in the generation layout, as one rank holds it.

    `name` and the sources have `{layer}` (and `{expert}`) for numbers; `layers` as in a kind. `segments` are its rows
    (columns for `axis` 1) in order. `experts`: the experts that it holds, in the order of their places in the first
    dimension; None for other parameters. `takes_pieces`: it may stay in several tensors, in order along the axis;
    otherwise it is one tensor, which can be the training shard's memory only if that has the same rows in this order.
    """

    name: str
    layers: tuple[int | None, ...]
    axis: int
    width: int | None
    weight_class: WeightClass
    segments: tuple[Segment, ...]
    experts: tuple[int, ...] | None = None
    takes_pieces: bool = False

    @property
    def length(self) -> int:
        """Rows (columns for `axis` 1) of the parameter (of one expert's)."""
        return sum(segment.length for segment in self.segments)


class EngineTargets(Protocol):
    """The parameters of a generation engine, rank by rank; every rank has the same names in the same order."""

    def of(self, rank: int) -> Sequence[Target]:
        """The parameters that global rank `rank` holds."""
        ...


class NativeTargets:
    """The native engine's: the same rules as training's, cut over the generation ranks, experts whole and spread."""

    def __init__(self, kinds: Kinds, grid: GenerationGrid) -> None:
        self._kinds = kinds
        self._grid = grid
        self._cache: dict[tuple[int, tuple[int, ...]], tuple[Target, ...]] = {}
        self._of_rank: dict[int, tuple[Target, ...]] = {}
        self._dense: dict[tuple[tuple[str, int | None], int], Target] = {}

    def of(self, rank: int) -> Sequence[Target]:
        """The parameters that global rank `rank` decodes with; equal ranks share them."""
        if rank not in self._of_rank:
            members = self._grid.members(self._grid.replica(rank))
            key = (self._grid.tp_rank(rank), tuple(self._grid.training.ep_rank(member) for member in members))
            if key not in self._cache:
                self._cache[key] = tuple(self._made(*key))
            self._of_rank[rank] = self._cache[key]
        return self._of_rank[rank]

    def _made(self, place: int, ep_ranks: tuple[int, ...]) -> Sequence[Target]:
        targets = []
        for kind in self._kinds.kinds:
            rule = kind.rule
            if rule.experts is not None:
                experts = nested_experts(rule.experts, self._grid.training.ep, ep_ranks)[place]
                segments = tuple(segment for block in rule.blocks for segment in block)
                targets.append(_native_target(kind, segments, experts))
                continue
            if (kind.key, place) not in self._dense:  # whatever experts it has beside, a place shares them
                self._dense[kind.key, place] = _native_target(kind, shard_segments(rule, self._grid.tp, place), None)
            targets.append(self._dense[kind.key, place])
        return targets


def _native_target(kind: Kind, segments: tuple[Segment, ...], experts: tuple[int, ...] | None) -> Target:
    return Target(
        name=kind.name,
        layers=kind.layers,
        axis=kind.axis,
        width=kind.width,
        weight_class=kind.rule.weight_class,
        segments=segments,
        experts=experts,
        takes_pieces=True,
    )


def real_length(kinds: Kinds, target: Target) -> int:
    """Rows of a target that the model has: all but the padding at the end of a vocabulary, which training may lack."""
    if target.weight_class != "vocabulary":
        return target.length
    real = 0
    for segment in target.segments:
        assert segment.source is not None, "padding has been given places"
        (block,) = kinds.of_source[segment.source, target.layers[0]].rule.blocks
        vocabulary_size = sum(each.length for each in block)
        real += max(0, min(segment.start + segment.length, vocabulary_size) - segment.start)
    return real


def nested_experts(num_experts: int, ep: int, ep_ranks: Sequence[int]) -> list[tuple[int, ...]]:
    """The experts of each rank of a replica, whose training expert-parallel ranks are `ep_ranks`: equal numbers, and
    as many as can be of those that the rank trains, so that they need not move."""
    size, local = len(ep_ranks), num_experts // ep
    assert num_experts % size == 0, f"{num_experts} experts do not divide over {size} generation ranks"
    share = num_experts // size
    taken: set[int] = set()
    held: list[list[int]] = []
    for ep_rank in ep_ranks:
        own = [expert for expert in range(ep_rank * local, (ep_rank + 1) * local) if expert not in taken][:share]
        taken |= set(own)
        held.append(own)
    left = iter([expert for expert in range(num_experts) if expert not in taken])
    return [tuple(sorted([*own, *(next(left) for _ in range(share - len(own)))])) for own in held]


def linear_experts(num_experts: int, size: int, place: int) -> tuple[int, ...]:
    """The experts of the rank at `place` of `size` where they are dealt in order, as vLLM deals them."""
    share = num_experts // size
    return tuple(range(place * share, (place + 1) * share))
