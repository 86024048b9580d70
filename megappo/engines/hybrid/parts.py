"""Of which pieces a generation parameter is made: runs of rows that lie together in one training shard.

The same in every layer that training makes alike. Imports neither torch nor megatron.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from megappo.config.grid import TrainingGrid
from megappo.engines.hybrid.kinds import Kind, Kinds, Places, Run
from megappo.engines.hybrid.targets import Target
from megappo.engines.hybrid.transfers import ExpertRun, Way


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a target that lie together in one shard of one kind, the same in every layer."""

    run: Run
    target_offset: int


@dataclass(frozen=True, slots=True)
class Part:
    """A span of a target for one run of its experts: the place in a stage of the rank that has it, and how it comes to
    that rank itself."""

    kind: Kind
    span: Span
    experts: ExpertRun | None
    source_place: int
    own_way: Way


class Parts:
    """The parts of the targets of one training grid's kinds; `grouped_experts` as in `Planner`."""

    def __init__(self, kinds: Kinds, training: TrainingGrid, *, grouped_experts: bool) -> None:
        self._kinds = kinds
        self._training = training
        self._grouped_experts = grouped_experts
        self._places = {kind.key: Places(kind, self._shards_of(kind)) for kind in kinds.kinds}
        # By a target's identity, which is kept alive beside: to hash its rows takes longer than to look them up.
        self._spans: dict[int, tuple[Target, tuple[Span, ...]]] = {}
        self._parts_of: dict[tuple[int, int], list[Part]] = {}

    def of(self, target: Target, rank: int) -> list[Part]:
        """What a target is made of in every layer: its spans, of each run of its experts."""
        spans, place = self.spans(target), rank % self._training.stage_size
        if (id(target), place) not in self._parts_of:
            self._parts_of[id(target), place] = self._made_parts(target, spans, rank)
        return self._parts_of[id(target), place]

    def spans(self, target: Target) -> tuple[Span, ...]:
        """The rows of a target, cut where a training shard ends; what continues on both sides is one span."""
        if id(target) not in self._spans:
            self._spans[id(target)] = target, tuple(_merged(self._cut(target)))
        return self._spans[id(target)][1]

    def _cut(self, target: Target) -> Iterator[Span]:
        offset = 0
        for segment in target.segments:
            assert segment.source is not None, "every row of a generation parameter has a tensor that it comes from"
            kind = self._kinds.of_source[segment.source, target.layers[0]]
            assert kind.layers == target.layers, f"{target.name}: layers that training makes differently"
            for row, run in self._places[kind.key].runs(segment.source, segment.start, segment.length):
                yield Span(run, offset + row - segment.start)
            offset += segment.length

    def _made_parts(self, target: Target, spans: tuple[Span, ...], rank: int) -> list[Part]:
        grid, parts = self._training, []
        for span in spans:
            kind, shard = span.run.kind, span.run.shard
            runs = self._expert_runs(target, kind)
            way = Way.LOCAL
            if target.takes_pieces or self._is_whole(target, span, is_alone=len(spans) == len(runs) == 1):
                way = Way.ALIAS
            for ep_rank, experts in runs:
                if experts is None:
                    source = grid.dense_rank(0, grid.dp_rank(rank), grid.tp_rank(rank) if shard is None else shard)
                else:
                    source = grid.expert_rank(0, grid.expert_dp_rank(rank), ep_rank, shard or 0)
                parts.append(Part(kind, span, experts, source, way))
        return parts

    def _is_whole(self, target: Target, span: Span, *, is_alone: bool) -> bool:
        """Whether one tensor can be the training shard's memory: the same rows in order, and without gaps in memory."""
        is_complete = is_alone and span.run.length == target.length
        is_full_width = span.run.length == self._places[span.run.kind.key].shard_length
        if target.experts is None:
            return is_complete and (target.axis == 0 or is_full_width)
        return is_complete and is_full_width and self._grouped_experts

    def _expert_runs(self, target: Target, kind: Kind) -> list[tuple[int, ExpertRun | None]]:
        """(expert-parallel rank that trains them, run) for the experts of a target; one run without experts else."""
        if target.experts is None:
            return [(0, None)]
        assert kind.rule.experts is not None, f"{target.name} holds experts, {kind.name} does not"
        local = kind.rule.experts // self._training.ep
        runs: list[tuple[int, ExpertRun | None]] = []
        for place, expert in enumerate(target.experts):
            ep_rank, source_place = divmod(expert, local)
            if runs:
                last_rank, last = runs[-1]
                if last is not None and last_rank == ep_rank and last.first + last.count == expert:
                    longer = ExpertRun(last.first, last.count + 1, last.source_place, last.target_place)
                    runs[-1] = (ep_rank, longer)
                    continue
            runs.append((ep_rank, ExpertRun(expert, 1, source_place, place)))
        return runs

    def _shards_of(self, kind: Kind) -> int:
        """Ranks that a training parameter's (one expert's) rows are cut over."""
        return self._training.etp if kind.rule.experts is not None else self._training.tp


def _merged(spans: Iterator[Span]) -> Iterator[Span]:
    current: Span | None = None
    for span in spans:
        if current is not None and _continues(current, span):
            run = current.run
            current = Span(Run(run.kind, run.shard, run.offset, run.length + span.run.length), current.target_offset)
            continue
        if current is not None:
            yield current
        current = span
    if current is not None:
        yield current


def _continues(first: Span, second: Span) -> bool:
    return (
        first.run.kind is second.run.kind
        and first.run.shard == second.run.shard
        and first.run.offset + first.run.length == second.run.offset
        and first.target_offset + first.run.length == second.target_offset
    )
