"""Where a rank stands in the training layout and in the generation layout. Pure arithmetic: imports no torch.

Training ranks are numbered as Megatron numbers them: tensor-parallel neighbours first, then context and data-parallel
copies, then pipeline stages; experts cut the ranks of a stage anew, expert-tensor-parallel neighbours first.

Generation replicas are strided over that grid, as in HybridFlow (Sheng et al. 2024, section 5.4), so that a rank's
training shard lies inside its generation shard wherever that is the larger of the two.
"""

from dataclasses import dataclass
from functools import cached_property
from math import gcd

from megappo.errors import ConfigError


@dataclass(frozen=True)
class TrainingGrid:
    """Parallel sizes of the training shards; world size = tp · dp · pp.

    `dp` counts the ranks that hold the same dense weights: data-parallel times context-parallel. `ep` ranks share the
    experts of a layer, each expert cut over `etp` ranks; `etp · ep` divides the `tp · dp` ranks of a stage.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        assert (self.tp * self.dp) % (self.ep * self.etp) == 0, f"ep · etp does not divide the ranks of a stage: {self}"

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.dp

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pp

    def stage(self, rank: int) -> int:
        return rank // self.stage_size

    def tp_rank(self, rank: int) -> int:
        return rank % self.tp

    def dp_rank(self, rank: int) -> int:
        return rank % self.stage_size // self.tp

    def ep_rank(self, rank: int) -> int:
        return rank % self.stage_size // self.etp % self.ep

    def etp_rank(self, rank: int) -> int:
        return rank % self.etp

    def expert_dp_rank(self, rank: int) -> int:
        """Which copy of the experts the rank holds."""
        return rank % self.stage_size // (self.etp * self.ep)

    def dense_rank(self, stage: int, dp_rank: int, tp_rank: int) -> int:
        """The rank at a place of the dense weights' grid."""
        return (stage * self.dp + dp_rank) * self.tp + tp_rank

    def expert_rank(self, stage: int, expert_dp_rank: int, ep_rank: int, etp_rank: int) -> int:
        """The rank at a place of the experts' grid."""
        return stage * self.stage_size + (expert_dp_rank * self.ep + ep_rank) * self.etp + etp_rank


@dataclass(frozen=True)
class GenerationGrid:
    """Replicas of `tp` ranks each, strided over a training grid; generation has no pipeline stages.

    With t the training and g the generation size: for g ≤ t a replica takes every (t / g)-th tensor-parallel rank of
    one stage. For g > t it takes all of them, of g / t copies where there are as many (those are the nearest ranks),
    and of further stages for what is left. ConfigError where neither works out.
    """

    training: TrainingGrid
    tp: int

    def __post_init__(self) -> None:
        problem = generation_problem(self.training, self.tp)
        if problem is not None:
            raise ConfigError(f"rollout.tensor_model_parallel_size: {problem}")

    @property
    def num_replicas(self) -> int:
        return self.training.world_size // self.tp

    def tp_rank(self, rank: int) -> int:
        """The rank's place in its replica."""
        training = self.training
        if self.tp <= training.tp:
            return training.tp_rank(rank) // self._narrowing
        copies, stages = self._widening
        place = training.stage(rank) % stages * copies + training.dp_rank(rank) % copies
        return training.tp_rank(rank) * copies * stages + place

    def replica(self, rank: int) -> int:
        """The number of the rank's replica: replicas are numbered in the order of their first ranks."""
        return self._replica_of_rank[rank]

    def members(self, replica: int) -> tuple[int, ...]:
        """The ranks of a replica in the order of their places, which is not always ascending."""
        return self.groups[replica]

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of every replica."""
        grouped: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.training.world_size):
            grouped.setdefault(self._key(rank), []).append(rank)
        return tuple(tuple(sorted(ranks, key=self.tp_rank)) for ranks in grouped.values())

    @cached_property
    def _replica_of_rank(self) -> dict[int, int]:
        return {rank: replica for replica, ranks in enumerate(self.groups) for rank in ranks}

    @property
    def _narrowing(self) -> int:
        """Training shards in a generation shard along the tensor-parallel axis, for tp ≤ training.tp."""
        return self.training.tp // self.tp

    @property
    def _widening(self) -> tuple[int, int]:
        """(copies, stages) whose ranks form one replica, for tp > training.tp."""
        factor = self.tp // self.training.tp
        copies = gcd(factor, self.training.dp)
        return copies, factor // copies

    def _key(self, rank: int) -> tuple[int, ...]:
        training = self.training
        if self.tp <= training.tp:
            return training.stage(rank), training.dp_rank(rank), training.tp_rank(rank) % self._narrowing
        copies, stages = self._widening
        return training.stage(rank) // stages, training.dp_rank(rank) // copies


def generation_problem(training: TrainingGrid, tp: int) -> str | None:
    """Why replicas of `tp` ranks can't be laid over the training grid, with the sizes that can; None where they can."""
    if _fits(training, tp):
        return None
    possible = [str(size) for size in range(1, training.world_size + 1) if _fits(training, size)]
    return (
        f"replicas of {tp} ranks can't be laid over tp {training.tp} · pp {training.pp} · dp {training.dp} without "
        f"cutting a shard unevenly; possible: {', '.join(possible)}"
    )


def _fits(training: TrainingGrid, tp: int) -> bool:
    if tp <= training.tp:
        return training.tp % tp == 0
    factor, rest = divmod(tp, training.tp)
    return rest == 0 and training.pp % (factor // gcd(factor, training.dp)) == 0
