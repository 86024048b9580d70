"""The switch for the native engine in its own layout: every piece is an alias or is received where it stays.

Nothing exists twice: a rank holds its training shard and, while generating, the shards that it received.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megappo.config.grid import GenerationGrid
from megappo.engines.hybrid.account import Account
from megappo.engines.hybrid.execute import Moved, Switch
from megappo.engines.hybrid.kinds import Kinds, with_numbers
from megappo.engines.hybrid.measure import measured_account
from megappo.engines.hybrid.messages import Views
from megappo.engines.hybrid.plan import Planner
from megappo.engines.hybrid.sources import TrainingShards
from megappo.engines.hybrid.targets import NativeTargets, Target
from megappo.engines.hybrid.transfers import Transfer
from megappo.engines.hybrid.weights import GenerationWeights
from megappo.engines.rollout import HeldBytes, SyncReport, WorstTensor
from megappo.models.architecture import ModelSpec
from megappo.parallel.mesh import Mesh


@dataclass(frozen=True)
class _Piece:
    offset: int
    tensor: Tensor


class PieceDestination:
    """Collects the pieces of one switch; received ones get memory of their own when their place is asked for.

    `float32` are the kinds that have this type whatever `dtype` the others are of.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device, float32: frozenset[str] = frozenset()) -> None:
        self._dtype = dtype
        self._float32 = float32
        self._device = device
        self._pieces: dict[tuple[str, int | None], list[_Piece]] = {}
        self.received_bytes = 0

    def alias(self, transfer: Transfer, views: Views) -> None:
        for place, view in enumerate(views):
            self._keep(transfer, view, place)

    def is_alias(self, transfer: Transfer, views: Views) -> bool:
        ours = {piece.tensor.data_ptr() for pieces in self._pieces.values() for piece in pieces}
        return all(view.data_ptr() in ours for view in views)

    def view(self, transfer: Transfer) -> Tensor:
        """A new piece to receive `transfer` into: [rows], or with the width before or after; experts come first."""
        rows, width = transfer.length, transfer.width
        shape: tuple[int, ...] = (rows,)
        if width is not None:
            shape = (rows, width) if transfer.axis == 0 else (width, rows)
        if transfer.experts is not None:
            shape = (transfer.experts.count, *shape)
        dtype = torch.float32 if transfer.target in self._float32 else self._dtype
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        self.received_bytes += tensor.nbytes
        self._keep(transfer, tensor, 0)
        return tensor

    def fill(self, weights: GenerationWeights, targets: Sequence[Target]) -> None:
        """Hands the pieces over, in order; rows that training has not, padding of the vocabulary, are zeros."""
        for target in targets:
            for layer in target.layers:
                name = with_numbers(target.name, layer)
                if target.experts is None:
                    weights.parameters[name] = self._ordered(name, None, target)
                else:
                    weights.experts[name] = {expert: self._ordered(name, expert, target) for expert in target.experts}

    def _keep(self, transfer: Transfer, tensor: Tensor, place: int) -> None:
        name, offset, run = transfer.target_name, transfer.target_offset, transfer.experts
        if run is None:
            self._pieces.setdefault((name, None), []).append(_Piece(offset, tensor))
            return
        for number, matrix in enumerate(tensor.unbind(0)):
            self._pieces.setdefault((name, run.first + place + number), []).append(_Piece(offset, matrix))

    def _ordered(self, name: str, expert: int | None, target: Target) -> tuple[Tensor, ...]:
        pieces = sorted(self._pieces.get((name, expert), ()), key=lambda piece: piece.offset)
        end = 0
        for piece in pieces:
            assert piece.offset == end, f"rows {end} to {piece.offset} of {name} came from nowhere"
            end += piece.tensor.shape[target.axis]
        tensors = [piece.tensor for piece in pieces]
        if end < target.length:
            assert target.weight_class == "vocabulary", f"rows from {end} on of {name} came from nowhere"
            tensors.append(torch.zeros(target.length - end, target.width or 1, dtype=self._dtype, device=self._device))
        return tuple(tensors)


class HybridTransfer:
    """Brings the training weights into `weights`, for the generation grid `grid`, whenever it is run.

    `model` is the bare stage. `bucket_bytes` bounds what is under way at once. Every rank of the world calls the same.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        mesh: Mesh,
        grid: GenerationGrid,
        weights: GenerationWeights,
        bucket_bytes: int,
    ) -> None:
        weight_map = spec.family.weight_map(spec.shape, "lm")
        kinds = Kinds.of(weight_map)
        self._mesh = mesh
        self._sources = TrainingShards(model, weight_map)
        self._targets = NativeTargets(kinds, grid)
        self._weights = weights
        self._dtype = next(model.parameters()).dtype
        self._weight_map = weight_map
        self._float32 = frozenset(kind.name for kind in kinds.kinds if kind.rule.is_float32)
        self.moved = Moved()
        """Of the last run."""
        self._switch: Switch | None = None
        self._held_bytes = 0
        self._planner = Planner(
            kinds,
            grid.training,
            self._targets,
            layers_of_stages=mesh.stage_layers(spec.shape.num_layers),
            element_bytes=self._dtype.itemsize,
            bucket_bytes=bucket_bytes,
            generation_tp=grid.tp,
            grouped_experts=self._sources.has_grouped_experts,
        )

    @property
    def planner(self) -> Planner:
        """The plan, for accounts of it."""
        return self._planner

    def measured(self) -> Account:
        """Bytes of the last run by weight class, as they came over the wire and lie in memory."""
        return measured_account(self._sources, self._weights, self._weight_map, self.moved)

    def run(self) -> SyncReport:
        """Fills the weights anew. Raises SwitchError."""
        start = time.perf_counter()
        asleep, self._held_bytes = self._held_bytes, 0
        self._weights.clear()
        moved = self.moved = self._moved()
        if self._mesh.device.type == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return SyncReport(
            bytes_aliased=moved.aliased,
            bytes_copied=moved.copied,
            bytes_sent=moved.sent,
            seconds=seconds,
            bytes_received=moved.received,
            peak_bytes=moved.peak_bytes,
            transfer_seconds=seconds,
            held=HeldBytes(asleep=asleep, with_weights=self._held_bytes, awake=self._held_bytes),
        )

    def _moved(self) -> Moved:
        destination = PieceDestination(self._dtype, self._mesh.device, self._float32)
        self._sources.refresh()
        self._switch = Switch(self._planner, self._mesh.rank, self._sources, destination, self._mesh.world_group)
        moved = self._sources.with_copies_counted(self._switch.run(), self._planner, self._mesh.rank)
        destination.fill(self._weights, self._targets.of(self._mesh.rank))
        self._held_bytes = destination.received_bytes
        return moved

    def worst_tensor(self) -> WorstTensor | None:
        """As `Switch.worst_tensor`; between `run` and `release`."""
        assert self._switch is not None, "there are no weights to compare"
        return self._switch.worst_tensor()

    def release(self) -> None:
        """Lets go of everything that was received."""
        self._weights.clear()
        self._switch, self._held_bytes = None, 0
        self._sources.drop()
