"""Linear layers, embedding and norms that own no weights: they compute on the pieces that a rank holds at the moment.

Each stands in the place of Megatron's module of the same role in a generation layout, is called like it, and gives the
same numbers up to the order of a sum. No two pieces are ever put together: their products are. What the pieces of a
parameter are is said in `engines/hybrid/weights.py`; the model that is built of these modules in `piece_model.py`.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megappo.engines.hybrid.weights import GenerationWeights, Pieces
from megappo.engines.native.ranks import DecodingRanks
from megappo.models.layers import rms_norm


def linear_rows(hidden: Tensor, pieces: Pieces) -> Tensor:
    """hidden @ weightᵀ for a weight that is cut along its rows: [..., in] → [..., rows of all pieces]."""
    if len(pieces) == 1:
        return F.linear(hidden, pieces[0])
    return torch.cat([F.linear(hidden, piece) for piece in pieces], dim=-1)


def linear_columns(hidden: Tensor, pieces: Pieces) -> Tensor:
    """hidden @ weightᵀ for a weight that is cut along its columns: [..., columns of all pieces] → [..., out]."""
    if len(pieces) == 1:
        return F.linear(hidden, pieces[0])
    flat = hidden.flatten(0, -2)
    parts = flat.split([piece.shape[1] for piece in pieces], dim=1)
    total = F.linear(parts[0], pieces[0])
    for part, piece in zip(parts[1:], pieces[1:], strict=True):
        total.addmm_(part, piece.t())
    return total.unflatten(0, hidden.shape[:-1])


class PieceModule(nn.Module):
    """A module that reads its weights where `GenerationWeights` has them, whenever it runs.

    Megatron constructs it with the arguments of the module that it replaces, which it has no use for.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self._weights: GenerationWeights | None = None

    def bind(self, weights: GenerationWeights, ranks: DecodingRanks, name: str) -> None:
        """Tells where the pieces are found, which ranks hold the others, and the module's name in the whole model."""
        self._weights = weights
        self._ranks = ranks
        self._name = name

    @property
    def weights(self) -> GenerationWeights:
        assert self._weights is not None, f"a {type(self).__name__} runs before it was bound to weights"
        return self._weights

    def pieces(self, parameter: str) -> Pieces:
        return self.weights.parameters[f"{self._name}.{parameter}"]

    def whole(self, parameter: str) -> Tensor:
        """A parameter that every rank holds whole."""
        pieces = self.pieces(parameter)
        assert len(pieces) == 1, f"{self._name}.{parameter} is on every rank, but came in {len(pieces)} pieces"
        return pieces[0]

    def summed(self, partial: Tensor) -> Tensor:
        """The sum over the ranks of the copy, in the tensor itself."""
        if self._ranks.tp_group.size() > 1:
            dist.all_reduce(partial, group=self._ranks.tp_group)
        return partial


class ColumnPieces(PieceModule):
    """Column-parallel: [..., in] → this rank's rows of the weight [..., out / tp], with their bias where it has one."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """[..., in] → [..., out / tp] and no bias, for it is added here."""
        output = linear_rows(hidden, self.pieces("weight"))
        offset = 0
        for piece in self.weights.parameters.get(f"{self._name}.bias", ()):
            output.narrow(-1, offset, len(piece)).add_(piece)
            offset += len(piece)
        return output, None


class WholePieces(PieceModule):
    """Not cut: [..., in] → [..., out] on every rank; no bias."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return F.linear(hidden, self.whole("weight")), None


class RowPieces(PieceModule):
    """Row-parallel: this rank's columns [..., in / tp] → the sum over all ranks, [..., out]; no bias."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return self.summed(self.partial(hidden)), None

    def partial(self, hidden: Tensor) -> Tensor:
        """This rank's part of the sum."""
        return linear_columns(hidden, self.pieces("weight"))


class NormPieces(PieceModule):
    """RMSNorm over the last dimension."""

    def __init__(self, *_: Any, eps: float, config: TransformerConfig | None = None, **__: Any) -> None:
        super().__init__()
        self._eps = eps
        self._is_zero_centered = config is not None and config.layernorm_zero_centered_gamma

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.whole("weight")
        return rms_norm(hidden, weight, self._eps, is_zero_centered=self._is_zero_centered)


class VocabularyPieces(PieceModule):
    """Embedding: token ids [...] → [..., hidden], each looked up on the rank and in the piece that has its row."""

    def forward(self, token_ids: Tensor) -> Tensor:
        """Token ids [...] → [..., hidden], summed over the ranks of the replica."""
        pieces = self.pieces("weight")
        first = self._ranks.place * sum(map(len, pieces))
        embedded = pieces[0].new_zeros(*token_ids.shape, pieces[0].shape[1])
        for piece in pieces:
            rows = token_ids - first
            is_here = (rows >= 0) & (rows < len(piece))
            embedded += F.embedding(rows.clamp(0, len(piece) - 1), piece) * is_here[..., None]
            first += len(piece)
        return self.summed(embedded)


class OutputPieces(PieceModule):
    """Vocabulary logits of this rank's rows: [..., hidden] → [..., padded vocabulary / tp]."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return linear_rows(hidden, self.pieces("weight")), None


class MLPPieces(PieceModule):
    """The gated feed-forward part of a dense layer: down(act(gate) · up), gate and up in one weight."""

    def __init__(self, *_: Any, config: TransformerConfig | None = None, **__: Any) -> None:
        super().__init__()
        self._activation = F.silu if config is None else config.activation_func
        self.linear_fc1 = ColumnPieces()
        self.linear_fc2 = RowPieces()

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return self.summed(self.partial(hidden)), None

    def partial(self, hidden: Tensor) -> Tensor:
        """This rank's part of the sum."""
        return self.linear_fc2.partial(gated(self.linear_fc1(hidden)[0], self._activation))


def gated(gate_and_up: Tensor, activation: Callable[[Tensor], Tensor] = F.silu) -> Tensor:
    """[..., 2 · n] → activation(first half) · second half, [..., n]."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return activation(gate) * up
