"""The switch for the native engine in its own layout: every piece is an alias or is received where it stays.

Nothing exists twice: a rank holds its training shard and, while generating, the shards that it received.
"""

import logging
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
from megappo.engines.hybrid.targets import NativeTargets, Target, real_length
from megappo.engines.hybrid.transfers import Transfer
from megappo.engines.hybrid.weights import GenerationWeights, Pieces
from megappo.engines.rollout import HeldBytes, SyncReport, WorstTensor
from megappo.models.architecture import ModelSpec
from megappo.parallel.mesh import Mesh

_log = logging.getLogger(__name__)


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
        self._filled: GenerationWeights | None = None
        self.received_bytes = 0

    def alias(self, transfer: Transfer, views: Views) -> None:
        for place, view in enumerate(views):
            self._keep(transfer, view, place)

    def is_alias(self, transfer: Transfer, views: Views) -> bool:
        current = self.current(transfer)
        if current is None:
            return False
        ours, theirs = (
            [matrix.data_ptr() for view in several for matrix in _matrices(transfer, view)]
            for several in (current, views)
        )
        return ours == theirs

    def has_moved(self) -> bool:
        """Never: pieces are for one run, and go to the weights after it."""
        return False

    def current(self, transfer: Transfer) -> Views | None:
        """The piece in the weights that were filled, as the engine reads it; of experts one each."""
        assert self._filled is not None, "the weights were not filled yet"
        name, run = transfer.target_name, transfer.experts
        if run is None:
            piece = _piece_at(self._filled.parameters.get(name, ()), transfer)
            return None if piece is None else (piece,)
        held = self._filled.experts.get(name, {})
        pieces = [_piece_at(held.get(run.first + number, ()), transfer) for number in range(run.count)]
        found = tuple(piece[None] for piece in pieces if piece is not None)
        return found if len(found) == run.count else None

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

    def fill(self, weights: GenerationWeights, targets: Sequence[Target], kinds: Kinds) -> None:
        """Hands the pieces over, in order. Rows beyond the end of the model's vocabulary that training has not are
        zeros; AssertionError where others came from nowhere."""
        self._filled = weights
        for target in targets:
            real = real_length(kinds, target)
            for layer in target.layers:
                name = with_numbers(target.name, layer)
                if target.experts is None:
                    weights.parameters[name] = self._ordered(name, None, target, real)
                else:
                    weights.experts[name] = {
                        expert: self._ordered(name, expert, target, real) for expert in target.experts
                    }

    def _keep(self, transfer: Transfer, tensor: Tensor, place: int) -> None:
        name, offset, run = transfer.target_name, transfer.target_offset, transfer.experts
        if run is None:
            self._pieces.setdefault((name, None), []).append(_Piece(offset, tensor))
            return
        for number, matrix in enumerate(tensor.unbind(0)):
            self._pieces.setdefault((name, run.first + place + number), []).append(_Piece(offset, matrix))

    def _ordered(self, name: str, expert: int | None, target: Target, real: int) -> Pieces:
        pieces = sorted(self._pieces.get((name, expert), ()), key=lambda piece: piece.offset)
        end = 0
        for piece in pieces:
            assert piece.offset == end, f"rows {end} to {piece.offset} of {name} came from nowhere"
            end += piece.tensor.shape[target.axis]
        tensors = [piece.tensor for piece in pieces]
        assert end >= real, f"rows {end} to {real} of {name} came from nowhere"
        if end < target.length:
            tensors.append(torch.zeros(target.length - end, target.width or 1, dtype=self._dtype, device=self._device))
        return tuple(tensors)


def _matrices(transfer: Transfer, view: Tensor) -> Sequence[Tensor]:
    """The experts' of a view of several."""
    return [view] if transfer.experts is None else view.unbind(0)


def _piece_at(pieces: Pieces, transfer: Transfer) -> Tensor | None:
    """The piece that begins where the rows of `transfer` belong, if it has as many."""
    offset = 0
    for piece in pieces:
        length = piece.shape[transfer.axis]
        if (offset, length) == (transfer.target_offset, transfer.length):
            return piece
        offset += length
    return None


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
        _log.info("weights between layouts: %s", self._planner.description)

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
            extra_bytes=moved.extra_bytes,
            transfer_seconds=seconds,
            held=HeldBytes(asleep=asleep, with_weights=self._held_bytes, awake=self._held_bytes),
        )

    def _moved(self) -> Moved:
        destination = PieceDestination(self._dtype, self._mesh.device, self._float32)
        self._sources.refresh()
        self._switch = Switch(self._planner, self._mesh.rank, self._sources, destination, self._mesh.world_group)
        moved = self._sources.with_copies_counted(self._switch.run(), self._planner, self._mesh.rank)
        destination.fill(self._weights, self._targets.of(self._mesh.rank), self._planner.kinds)
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
