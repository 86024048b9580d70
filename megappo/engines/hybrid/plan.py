"""The plan: what each rank of the generation layout takes from whom. A pure function of two layouts and a weight map.

A rank's part costs work in proportion to its own shards, so that plans for thousands of ranks can be made and checked
on one machine. Imports neither torch nor megatron; `execute.py` carries a plan out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megappo.config.grid import TrainingGrid
from megappo.engines.hybrid.buckets import Buckets
from megappo.engines.hybrid.kinds import Kind, Kinds, Places, Run
from megappo.engines.hybrid.targets import EngineTargets, Target
from megappo.engines.hybrid.transfers import ExpertRun, Transfer, Way


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows of a target that lie together in one shard of one kind, the same in every layer."""

    run: Run
    target_offset: int


@dataclass(frozen=True, slots=True)
class _Part:
    """A span of a target for one run of its experts: the place in a stage of the rank that has it, and how it comes to
    that rank itself."""

    kind: Kind
    span: _Span
    experts: ExpertRun | None
    source_place: int
    own_way: Way


class Planner:
    """Plans for the ranks of one training grid and the generation engine that `targets` describes.

    `layers_of_stages`: how many layers each pipeline stage holds; of more than there are ranks in a pipeline, virtual
    stages, these have every pp-th. `element_bytes` is the size of an element,
    `bucket_bytes` what a rank receives at once at most (a bucket holds at least one row, or one expert).
    `grouped_experts`: training holds the experts of a layer in one parameter.
    """

    def __init__(
        self,
        kinds: Kinds,
        training: TrainingGrid,
        targets: EngineTargets,
        *,
        layers_of_stages: Sequence[int],
        element_bytes: int,
        bucket_bytes: int,
        generation_tp: int,
        grouped_experts: bool = True,
    ) -> None:
        assert len(layers_of_stages) % training.pp == 0, f"{training.pp} stages, and layers of {len(layers_of_stages)}"
        self.kinds = kinds
        self.training = training
        self.targets = targets
        self.element_bytes = element_bytes
        self.grouped_experts = grouped_experts
        self._stage_of_layer = [
            stage % training.pp for stage, count in enumerate(layers_of_stages) for _ in range(count)
        ]
        self.buckets = Buckets.of(kinds, self._stage_of_layer, training.tp, generation_tp, element_bytes, bucket_bytes)
        self._places = {kind.key: Places(kind, self.shards_of(kind)) for kind in kinds.kinds}
        # By a target's identity, which is kept alive beside: to hash its rows takes longer than to look them up.
        self._spans: dict[int, tuple[Target, tuple[_Span, ...]]] = {}
        self._parts_of: dict[tuple[int, int], list[_Part]] = {}
        self._held: dict[tuple[int, int, int], tuple[Sequence[Target], list[tuple[Target, list[_Part]]]]] = {}

    def shards_of(self, kind: Kind) -> int:
        """Ranks that a training parameter's (one expert's) rows are cut over."""
        return self.training.etp if kind.rule.experts is not None else self.training.tp

    def shard_length(self, kind: Kind) -> int:
        """Rows that one training shard holds."""
        return self._places[kind.key].shard_length

    def stages_of(self, kind: Kind, layer: int | None) -> tuple[int, ...]:
        """The pipeline stages that hold a parameter: one, or two for a tied embedding."""
        if layer is not None:
            return (self._stage_of_layer[layer],)
        first, last = 0, self.training.pp - 1
        if kind.name in self.kinds.tied and first != last:
            return first, last
        return (first,) if kind.name.startswith("embedding.") else (last,)

    def receives(self, rank: int, source_rank: int | None = None) -> Iterator[Transfer]:
        """Everything that the parameters of `rank` are made of, in an order that depends on the engine alone; with
        `source_rank` only what that rank holds for it."""
        if source_rank is not None:
            yield from self._sent(source_rank, rank)
            return
        for target in self.targets.of(rank):
            yield from self._of_target(target, self._parts(target, rank), rank, None)

    def _of_target(
        self, target: Target, parts: Sequence[_Part], rank: int, source_rank: int | None
    ) -> Iterator[Transfer]:
        """`parts` of `target` in all layers; with `source_rank` in those of its stage that it serves `rank` with."""
        own_stage, stage_size = self.training.stage(rank), self.training.stage_size
        for layer in target.layers:
            for part in parts:
                stages = self.stages_of(part.kind, layer)
                stage = own_stage if own_stage in stages else stages[0]
                source = stage * stage_size + part.source_place
                if source_rank is None or source == source_rank:
                    yield self._transfer(part, target, layer, source, rank)

    def _sent(self, source_rank: int, rank: int) -> Iterator[Transfer]:
        """What one rank holds for another."""
        targets, size = self.targets.of(rank), self.training.stage_size
        # Most ranks have nothing for most others; those of one place in their stages ask for the same.
        key = (id(targets), rank % size, source_rank % size)
        if key not in self._held:
            parts = [(target, self._parts(target, rank)) for target in targets]
            served = [(target, [part for part in each if part.source_place == key[2]]) for target, each in parts]
            self._held[key] = targets, [(target, each) for target, each in served if each]
        for target, mine in self._held[key][1]:
            yield from self._of_target(target, mine, rank, source_rank)

    def sends(self, rank: int) -> Iterator[Transfer]:
        """What `rank` sends to others, receiver by receiver; each receiver's in the order in which it receives them."""
        for peer in self.peers(rank):
            yield from self.receives(peer, rank)

    def peers(self, rank: int) -> Sequence[int]:
        """The ranks that may take something from `rank`: those of its own data-parallel index, of every stage."""
        grid, peers = self.training, set()
        for stage in range(grid.pp):
            peers |= {grid.dense_rank(stage, grid.dp_rank(rank), tp_rank) for tp_rank in range(grid.tp)}
            if any(kind.rule.experts is not None for kind in self.kinds.kinds):
                peers |= {
                    grid.expert_rank(stage, grid.expert_dp_rank(rank), ep_rank, etp_rank)
                    for ep_rank in range(grid.ep)
                    for etp_rank in range(grid.etp)
                }
        return sorted(peers - {rank})

    def spans(self, target: Target) -> tuple[_Span, ...]:
        """The rows of a target, cut where a training shard ends; what continues on both sides is one span."""
        if id(target) not in self._spans:
            self._spans[id(target)] = target, tuple(_merged(self._cut(target)))
        return self._spans[id(target)][1]

    def _cut(self, target: Target) -> Iterator[_Span]:
        offset = 0
        for segment in target.segments:
            assert segment.source is not None, "every row of a generation parameter has a tensor that it comes from"
            kind = self.kinds.of_source[segment.source, target.layers[0]]
            assert kind.layers == target.layers, f"{target.name}: layers that training makes differently"
            for row, run in self._places[kind.key].runs(segment.source, segment.start, segment.length):
                yield _Span(run, offset + row - segment.start)
            offset += segment.length

    def _parts(self, target: Target, rank: int) -> list[_Part]:
        """What a target is made of in every layer: its spans, of each run of its experts."""
        spans, place = self.spans(target), rank % self.training.stage_size
        if (id(target), place) not in self._parts_of:
            self._parts_of[id(target), place] = self._made_parts(target, spans, rank)
        return self._parts_of[id(target), place]

    def _made_parts(self, target: Target, spans: tuple[_Span, ...], rank: int) -> list[_Part]:
        grid, parts = self.training, []
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
                parts.append(_Part(kind, span, experts, source, way))
        return parts

    def _transfer(self, part: _Part, target: Target, layer: int | None, source: int, rank: int) -> Transfer:
        run, experts = part.span.run, part.experts
        return Transfer(
            way=part.own_way if source == rank else Way.GATHER,
            source_rank=source,
            target_rank=rank,
            source=part.kind.name,
            target=target.name,
            layer=layer,
            axis=target.axis,
            source_offset=run.offset,
            target_offset=part.span.target_offset,
            length=run.length,
            width=part.kind.width,
            experts=experts,
            num_elements=run.length * (part.kind.width or 1) * (1 if experts is None else experts.count),
            weight_class=target.weight_class,
            buckets=self.buckets.of_parameter(part.kind.name, layer),
        )

    def _is_whole(self, target: Target, span: _Span, *, is_alone: bool) -> bool:
        """Whether one tensor can be the training shard's memory: the same rows in order, and without gaps in memory."""
        is_complete = is_alone and span.run.length == target.length
        is_full_width = span.run.length == self.shard_length(span.run.kind)
        if target.experts is None:
            return is_complete and (target.axis == 0 or is_full_width)
        return is_complete and is_full_width and self.grouped_experts

    def _expert_runs(self, target: Target, kind: Kind) -> list[tuple[int, ExpertRun | None]]:
        """(expert-parallel rank that trains them, run) for the experts of a target; one run without experts else."""
        if target.experts is None:
            return [(0, None)]
        assert kind.rule.experts is not None, f"{target.name} holds experts, {kind.name} does not"
        local = kind.rule.experts // self.training.ep
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


def even_stages(num_layers: int, pp: int) -> list[int]:
    """Layers of each stage, as equal as can be, the first ones with one more where they do not divide."""
    share, rest = divmod(num_layers, pp)
    return [share + (stage < rest) for stage in range(pp)]


def _merged(spans: Iterator[_Span]) -> Iterator[_Span]:
    current: _Span | None = None
    for span in spans:
        if current is not None and _continues(current, span):
            run = current.run
            current = _Span(Run(run.kind, run.shard, run.offset, run.length + span.run.length), current.target_offset)
            continue
        if current is not None:
            yield current
        current = span
    if current is not None:
        yield current


def _continues(first: _Span, second: _Span) -> bool:
    return (
        first.run.kind is second.run.kind
        and first.run.shard == second.run.shard
        and first.run.offset + first.run.length == second.run.offset
        and first.target_offset + first.run.length == second.target_offset
    )
