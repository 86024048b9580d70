"""How many bytes of a parameter are under way at once on the busiest rank, for all ranks, without their plans.

Ranks that exchange dense weights have one data-parallel index, those that exchange experts one copy of them: groups
that are made alike exchange alike, so that a few of them stand for thousands of ranks. Imports no torch.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from megappo.config.grid import TrainingGrid
from megappo.engines.hybrid.kinds import Kind
from megappo.engines.hybrid.parts import Parts
from megappo.engines.hybrid.targets import EngineTargets, Target
from megappo.engines.hybrid.transfers import num_lines

_Identity = tuple[tuple[int, ...], ...]
"""Of each rank of a stage, which parameters are its targets."""


@dataclass(frozen=True, slots=True)
class _Flow:
    """Rows of one parameter that the rank at place `source` of a stage holds and that at `receiver` generates with."""

    source: int
    receiver: int
    lines: int
    line_bytes: int


@dataclass(frozen=True, slots=True)
class _Group:
    """Ranks that exchange one kind among each other: by stage, which of the distinct `flows` are theirs."""

    flows: tuple[tuple[_Flow, ...], ...]
    of_stage: tuple[int, ...]


@dataclass(frozen=True)
class _Sums:
    """Bytes by place in a stage. `away`: without what a rank has itself, in a stage that holds the parameter."""

    received: Counter[int]
    received_away: Counter[int]
    sent: Counter[int]
    sent_away: Counter[int]

    @cached_property
    def most_received(self) -> int:
        return max(self.received.values(), default=0)


class Traffic:
    """Bytes under way of any kind. `element_bytes` as in `Planner`."""

    def __init__(self, training: TrainingGrid, targets: EngineTargets, parts: Parts, element_bytes: int) -> None:
        self._training = training
        # Kept, for what follows goes by their identity: to compare them takes longer than to look them up.
        self._targets = [targets.of(rank) for rank in range(training.world_size)]
        self._parts = parts
        self._element_bytes = element_bytes
        self._groups: dict[tuple[str, int | None], list[_Group]] = {}
        self._sums: dict[tuple[int, int], _Sums] = {}
        self._owners: dict[tuple[object, ...], int] = {}
        self._by_kind: dict[int, dict[tuple[str, int | None], list[Target]]] = {}

    def busiest(self, kind: Kind, stages: Sequence[int], num_parts: int) -> list[int]:
        """Of each stage, the most bytes that a rank receives and sends at once of one layer's parameter of `kind`,
        which `stages` hold, where it travels in `num_parts` parts (each taken for as many lines as the largest)."""
        groups = self._groups_of(kind)
        return [
            max(self._owner(group, stages, stage, num_parts) for group in groups)
            if stage in stages
            else max(self._sums_of(group, stage, num_parts).most_received for group in groups)
            for stage in range(self._training.pp)
        ]

    def most_lines(self, kind: Kind) -> int:
        """Lines of the largest transfer: in more parts than these it can't travel."""
        flows = (flow for group in self._groups_of(kind) for several in group.flows for flow in several)
        return max((flow.lines for flow in flows), default=1)

    def _owner(self, group: _Group, stages: Sequence[int], stage: int, num_parts: int) -> int:
        """Of a rank in a stage that holds the parameter. Its first stage serves those that don't."""
        served = (other for other in range(self._training.pp) if other not in stages and stage == stages[0])
        others = Counter(group.of_stage[other] for other in served)
        key = (id(group), group.of_stage[stage], frozenset(others.items()), num_parts)
        if key not in self._owners:
            own = self._sums_of(group, stage, num_parts)
            total = own.received_away + own.sent_away
            for number, count in others.items():
                sent = self._of_flows(group.flows[number], num_parts).sent
                total.update({place: count * size for place, size in sent.items()})
            self._owners[key] = max(total.values(), default=0)
        return self._owners[key]

    def _sums_of(self, group: _Group, stage: int, num_parts: int) -> _Sums:
        return self._of_flows(group.flows[group.of_stage[stage]], num_parts)

    def _of_flows(self, flows: tuple[_Flow, ...], num_parts: int) -> _Sums:
        key = id(flows), num_parts
        if key not in self._sums:
            sums = _Sums(Counter(), Counter(), Counter(), Counter())
            for flow in flows:
                size = -(-flow.lines // num_parts) * flow.line_bytes
                sums.received[flow.receiver] += size
                sums.sent[flow.source] += size
                if flow.source != flow.receiver:
                    sums.received_away[flow.receiver] += size
                    sums.sent_away[flow.source] += size
            self._sums[key] = sums
        return self._sums[key]

    def _groups_of(self, kind: Kind) -> list[_Group]:
        """One group of each way in which a kind is exchanged; kept, for sums go by its identity."""
        if kind.key not in self._groups:
            self._groups[kind.key] = list(self._distinct(kind))
        return self._groups[kind.key]

    def _distinct(self, kind: Kind) -> Iterator[_Group]:
        seen: set[tuple[_Identity, ...]] = set()
        for members in self._expert_members if kind.rule.experts is not None else self._dense_members:
            held = [[self._held(kind, rank) for rank in ranks] for ranks in members]
            stages = tuple(tuple(tuple(map(id, targets)) for targets in of_stage) for of_stage in held)
            if stages in seen:
                continue
            seen.add(stages)
            numbers = {identity: number for number, identity in enumerate(dict.fromkeys(stages))}
            firsts = [stages.index(identity) for identity in numbers]
            flows = tuple(tuple(self._flows(kind, held[stage], members[stage])) for stage in firsts)
            yield _Group(flows, tuple(numbers[identity] for identity in stages))

    def _flows(self, kind: Kind, held: Sequence[Sequence[Target]], ranks: Sequence[int]) -> Iterator[_Flow]:
        for targets, rank in zip(held, ranks, strict=True):
            for target in targets:
                for part in self._parts.of(target, rank):
                    if part.kind is kind:
                        lines = num_lines(target.axis, part.span.run.length, kind.width)
                        elements = part.span.run.length * (kind.width or 1) // lines
                        count = 1 if part.experts is None else part.experts.count
                        line_bytes = elements * kind.element_bytes(self._element_bytes)
                        yield _Flow(part.source_place, rank % self._training.stage_size, lines * count, line_bytes)

    def _held(self, kind: Kind, rank: int) -> Sequence[Target]:
        """The parameters of a rank that have rows of a kind."""
        targets = self._targets[rank]
        if id(targets) not in self._by_kind:
            by_kind = self._by_kind[id(targets)] = {}
            for target in targets:
                for key in dict.fromkeys(span.run.kind.key for span in self._parts.spans(target)):
                    by_kind.setdefault(key, []).append(target)
        return self._by_kind[id(targets)].get(kind.key, ())

    @cached_property
    def _dense_members(self) -> list[list[list[int]]]:
        """Of each data-parallel index, its ranks by stage; of those whose ranks hold the same targets, one."""
        grid = self._training
        return self._one_of_each(
            [
                [[grid.dense_rank(stage, dp_rank, tp_rank) for tp_rank in range(grid.tp)] for stage in range(grid.pp)]
                for dp_rank in range(grid.dp)
            ]
        )

    @cached_property
    def _expert_members(self) -> list[list[list[int]]]:
        grid = self._training
        return self._one_of_each(
            [
                [
                    [
                        grid.expert_rank(stage, copy, ep_rank, etp_rank)
                        for ep_rank in range(grid.ep)
                        for etp_rank in range(grid.etp)
                    ]
                    for stage in range(grid.pp)
                ]
                for copy in range(grid.stage_size // (grid.ep * grid.etp))
            ]
        )

    def _one_of_each(self, groups: list[list[list[int]]]) -> list[list[list[int]]]:
        distinct: dict[tuple[int, ...], list[list[int]]] = {}
        for members in groups:
            key = tuple(id(self._targets[rank]) for ranks in members for rank in ranks)
            distinct.setdefault(key, members)
        return list(distinct.values())
