"""The weights of a generation layout on one rank, as pieces. What puts them there is `execute.py`."""

from dataclasses import dataclass, field

from torch import Tensor

Pieces = tuple[Tensor, ...]
"""Parts of one parameter, in order along its rule's axis: concatenated they are this rank's generation shard. A piece
is a view of the training shard, or memory that another rank's shard was received into; no piece exists twice."""


@dataclass
class GenerationWeights:
    """Global Megatron name (the first of a rule's names) → pieces; for experts, by their number in the layer.

    `experts` holds the experts of this rank's replica member alone. Empty while training has its turn.
    """

    parameters: dict[str, Pieces] = field(default_factory=dict)
    experts: dict[str, dict[int, Pieces]] = field(default_factory=dict)

    def clear(self) -> None:
        """Lets go of all pieces; received memory is free afterwards."""
        self.parameters.clear()
        self.experts.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces, those inside the training shards included."""
        whole = [*self.parameters.values(), *(pieces for layer in self.experts.values() for pieces in layer.values())]
        return sum(piece.numel() * piece.element_size() for pieces in whole for piece in pieces)
