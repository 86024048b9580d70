"""The ranks that decode together, and this rank's place among them: all that the decoding loop knows of a layout."""

from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from megappo.parallel.mesh import Mesh


@dataclass(frozen=True)
class DecodingRanks:
    """One copy of the model: `copy_group` holds all its ranks, `tp_group` those of this rank's stage, `pp_group` the
    stages of this rank's shard.

    `tp_order[place]` is the index in `tp_group` of the rank that holds the `place`-th shard. The first rank
    of the last stage's `tp_group` draws tokens; its global rank is `drawing_rank`. Steps are padded to a multiple of
    `sequence_alignment` tokens.
    """

    device: torch.device
    copy_group: ProcessGroup
    tp_group: ProcessGroup
    pp_group: ProcessGroup
    tp_order: tuple[int, ...]
    drawing_rank: int
    sequence_alignment: int

    @classmethod
    def of_mesh(cls, mesh: Mesh) -> "DecodingRanks":
        """The training layout's own: decoding on the training shards where they lie."""
        return cls(
            device=mesh.device,
            copy_group=mesh.model_parallel_group,
            tp_group=mesh.tp_group,
            pp_group=mesh.pp_group,
            tp_order=tuple(range(mesh.tp)),
            drawing_rank=int(mesh.grid[-1, mesh.dp_rank, mesh.cp_rank, 0]),
            sequence_alignment=mesh.tp if mesh.sequence_parallel else 1,
        )

    @property
    def stage(self) -> int:
        return self.pp_group.rank()

    @property
    def place(self) -> int:
        """Which shard of its stage this rank holds."""
        return self.tp_order.index(self.tp_group.rank())
