"""The plan: what each rank of the generation layout takes from whom. A pure function of two layouts and a weight map.

A rank's part costs work in proportion to its own shards, so that plans for thousands of ranks can be made and checked
on one machine. Imports neither torch nor megatron; `execute.py` carries a plan out.
"""

from collections.abc import Iterator, Sequence

from megappo.config.grid import TrainingGrid
from megappo.engines.hybrid.buckets import Buckets, StagesOf
from megappo.engines.hybrid.kinds import Kind, Kinds
from megappo.engines.hybrid.layout_text import layout_text
from megappo.engines.hybrid.parts import Part, Parts
from megappo.engines.hybrid.targets import EngineTargets, Target
from megappo.engines.hybrid.traffic import Traffic
from megappo.engines.hybrid.transfers import Transfer, Way


class Planner:
    """Plans for the ranks of one training grid and the generation engine that `targets` describes.

    `layers_of_stages`: how many layers each pipeline stage holds; of more than there are ranks in a pipeline, virtual
    stages, these have every pp-th. `element_bytes` is the size of an element, of kinds that are not always float32.
    `bucket_bytes` bounds what a rank receives and sends at once. `grouped_experts`: training holds the experts of a
    layer in one parameter. ConfigError where `bucket_bytes` is less than a row to each of a rank's peers.
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
        self.generation_tp = generation_tp
        self.element_bytes = element_bytes
        stage_of_layer = [stage % training.pp for stage, count in enumerate(layers_of_stages) for _ in range(count)]
        self.stages_of = StagesOf(stage_of_layer, _stages_of_ends(kinds, training.pp))
        """(kind, layer) → the pipeline stages that hold a parameter: one, or two for a tied embedding."""
        self.parts = Parts(kinds, training, grouped_experts=grouped_experts)
        traffic = Traffic(training, targets, self.parts, element_bytes)
        self.buckets = Buckets.of(kinds, self.stages_of, traffic, bucket_bytes)
        # By the identity of a rank's targets, which are kept alive beside, as in `Parts`.
        self._held: dict[tuple[int, int, int], tuple[Sequence[Target], list[tuple[Target, list[Part]]]]] = {}

    @property
    def description(self) -> str:
        """What is planned and what it takes, for a log."""
        return (
            f"{layout_text(self.training)} → replicas of {self.generation_tp}, in {self.buckets.count} buckets; a "
            f"switch takes at most {self.extra_bytes:,} bytes beyond the parameters on any rank"
        )

    @property
    def extra_bytes(self) -> int:
        """Memory beyond parameters that a switch takes at most on any rank: that of two buckets, as if nothing of them
        were sent from where it lies or received where it belongs. Twice `bucket_bytes` at most."""
        return self.buckets.extra_bytes

    def whole_bytes(self, kind: Kind) -> int:
        """Bytes of one layer's parameter, with the padding of training."""
        return kind.num_elements(self.training.tp) * kind.element_bytes(self.element_bytes)

    def receives(self, rank: int, source_rank: int | None = None) -> Iterator[Transfer]:
        """Everything that the parameters of `rank` are made of, in an order that depends on the engine alone; with
        `source_rank` only what that rank holds for it."""
        if source_rank is not None:
            yield from self._sent(source_rank, rank)
            return
        for target in self.targets.of(rank):
            yield from self._of_target(target, self.parts.of(target, rank), rank, None)

    def _of_target(
        self, target: Target, parts: Sequence[Part], rank: int, source_rank: int | None
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
            parts = [(target, self.parts.of(target, rank)) for target in targets]
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

    def _transfer(self, part: Part, target: Target, layer: int | None, source: int, rank: int) -> Transfer:
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
            element_bytes=part.kind.element_bytes(self.element_bytes),
            weight_class=target.weight_class,
            buckets=self.buckets.of_parameter(part.kind.name, layer),
        )


def _stages_of_ends(kinds: Kinds, pp: int) -> dict[str, tuple[int, ...]]:
    """The stages of the kinds outside of the layers."""
    first, last = (0,), (pp - 1,)
    ends: dict[str, tuple[int, ...]] = {}
    for kind in kinds.kinds:
        if None in kind.layers:
            is_copied = kind.name in kinds.tied and pp > 1
            ends[kind.name] = first + last if is_copied else first if kind.name.startswith("embedding.") else last
    return ends


def even_stages(num_layers: int, pp: int) -> list[int]:
    """Layers of each stage, as equal as can be, the first ones with one more where they do not divide."""
    share, rest = divmod(num_layers, pp)
    return [share + (stage < rest) for stage in range(pp)]
