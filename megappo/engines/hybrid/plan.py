"""The plan: what each rank of the generation layout takes from whom. A pure function of two layouts and a weight map.

A rank's part costs work in proportion to its own shards, so that plans for thousands of ranks can be made and checked
on one machine. Imports neither torch nor megatron; `execute.py` carries a plan out.
"""

from collections.abc import Iterator, Sequence

from megappo.config.grid import TrainingGrid
from megappo.engines.hybrid.buckets import Buckets
from megappo.engines.hybrid.kinds import Kind, Kinds
from megappo.engines.hybrid.parts import Part, Parts
from megappo.engines.hybrid.targets import EngineTargets, Target
from megappo.engines.hybrid.transfers import Transfer, Way


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
        self._stage_of_layer = [
            stage % training.pp for stage, count in enumerate(layers_of_stages) for _ in range(count)
        ]
        self.buckets = Buckets.of(kinds, self._stage_of_layer, training.tp, generation_tp, element_bytes, bucket_bytes)
        self.parts = Parts(kinds, training, grouped_experts=grouped_experts)
        # By the identity of a rank's targets, which are kept alive beside, as in `Parts`.
        self._held: dict[tuple[int, int, int], tuple[Sequence[Target], list[tuple[Target, list[Part]]]]] = {}

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
            weight_class=target.weight_class,
            buckets=self.buckets.of_parameter(part.kind.name, layer),
        )


def even_stages(num_layers: int, pp: int) -> list[int]:
    """Layers of each stage, as equal as can be, the first ones with one more where they do not divide."""
    share, rest = divmod(num_layers, pp)
    return [share + (stage < rest) for stage in range(pp)]
