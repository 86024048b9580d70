"""The native rollout engine in a generation layout of its own: another tensor-parallel size, one stage, experts spread.

At each switch the shards that a rank lacks are received from the ranks that train them; it decodes on those and on its
own training shard, piece by piece. The decoding loop is `native/loop.py`, the transfer `hybrid/native.py`.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from collections.abc import Callable, Sequence

from torch import nn

from megappo.config.grid import GenerationGrid
from megappo.engines.hybrid.native import HybridTransfer
from megappo.engines.hybrid.weights import GenerationWeights
from megappo.engines.native.check import check_generation_size, check_model
from megappo.engines.native.loop import DecodingLoop
from megappo.engines.native.piece_model import build_piece_model
from megappo.engines.native.ranks import DecodingRanks
from megappo.engines.native_rollout import finish_parameter_gather
from megappo.engines.rollout import (
    Completion,
    GenerationRequest,
    Progress,
    Replicas,
    SamplingParams,
    SyncReport,
    WorstTensor,
)
from megappo.models.architecture import ModelSpec
from megappo.models.chunks import unwrapped
from megappo.parallel.groups import own_group
from megappo.parallel.mesh import Mesh


class NativeLayoutEngine:
    """`RolloutEngine` on replicas of `tp` ranks, strided over the training layout as `GenerationGrid` says.

    `model` is this rank's training stage, in Megatron's wrappers or not. `decode`, `eos_ids`, `max_num_seqs` and
    `max_num_batched_tokens` are as in `DecodingLoop`; `bucket_bytes` bounds what a switch has under way at once.
    Raises ConfigError where `tp` fits neither the training layout nor the model, or the model is not decoded.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        mesh: Mesh,
        *,
        tp: int,
        decode: Callable[[Sequence[int]], str],
        eos_ids: Sequence[int],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        bucket_bytes: int,
        records_experts: bool = False,
    ) -> None:
        check_generation_size(spec.shape, tp)
        self._wrapped = model
        stage = unwrapped(model)
        self._grid = GenerationGrid(mesh.training_grid, tp)
        self._weights = GenerationWeights()
        self._transfer = HybridTransfer(stage, spec, mesh, self._grid, self._weights, bucket_bytes)
        self._has_turn = False
        ranks = decoding_ranks(self._grid, mesh)
        generation_model = build_piece_model(spec.shape, mesh, ranks, self._weights, stage.config.params_dtype)
        check_model(generation_model.config)
        self._loop = DecodingLoop(
            generation_model,
            spec.shape,
            ranks,
            decode,
            tuple(eos_ids),
            max_num_seqs,
            max_num_batched_tokens,
            records_experts,
        )

    @property
    def replicas(self) -> Replicas:
        return Replicas(self._grid.groups)

    def sync_weights(self) -> SyncReport:
        """Makes the training shards of this moment the generation shards; every rank of the world calls it.

        With an overlapped parameter gather the optimizer leaves them stale until the next forward: it is forced.
        Raises SwitchError where a rank is lost.
        """
        finish_parameter_gather(self._wrapped)
        report = self._transfer.run()
        self._has_turn = True
        return report

    def worst_tensor(self) -> WorstTensor | None:
        """The parameter whose pieces are farthest from the training shards; None where all are equal. Every rank of the
        world calls it, between `sync_weights` and `release`."""
        return self._transfer.worst_tensor()

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[Completion]:
        """As `DecodingLoop.generate`; between `sync_weights` and `release` only."""
        assert self._has_turn, "generate was called while training has its turn; call sync_weights first"
        return self._loop.generate(requests, sampling, progress)

    def release(self) -> None:
        """Lets go of all received weights."""
        self._has_turn = False
        self._transfer.release()

    def close(self) -> None:
        """The same: process groups stay until the mesh is stopped."""
        self.release()


def decoding_ranks(grid: GenerationGrid, mesh: Mesh) -> DecodingRanks:
    """This rank's replica as one stage of `grid.tp` ranks; every rank of the world calls it.

    A group's ranks are in ascending order (torch 2.11 has no other), so that their order in the replica stands beside.
    """
    members = grid.members(grid.replica(mesh.rank))
    ordered = sorted(members)
    group = own_group(grid.groups)
    return DecodingRanks(
        device=mesh.device,
        copy_group=group,
        tp_group=group,
        pp_group=own_group([(rank,) for rank in range(mesh.world_size)]),
        tp_order=tuple(ordered.index(rank) for rank in members),
        drawing_rank=ordered[0],
        sequence_alignment=1,
    )
