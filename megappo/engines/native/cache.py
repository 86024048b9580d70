"""The key-value cache: one tensor a layer, one slot a sequence. Who lives in which slot is the schedule's business."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.engines.native.schedule import SlotCopy

# Positions that the cache grows by at least: early-stopping responses don't pay for the longest one.
GROWTH = 128


@dataclass(frozen=True)
class CacheShape:
    """What a cache holds on this rank; `max_length` is the most positions that a slot will ever need."""

    num_layers: int
    num_slots: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    value_head_dim: int | None = None
    """Where values are not as wide as keys."""


class KVCache:
    """Keys and values of this rank's layers and heads: `layers[i]` has each, [slots, kv heads, positions, head_dim].

    Memory starts at zero, so that a position that was never written is finite: attention masks it, and 0 · NaN is NaN.
    """

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        widths = (shape.head_dim, shape.value_head_dim or shape.head_dim)
        key, value = (
            torch.zeros(shape.num_slots, shape.num_kv_heads, 0, width, dtype=dtype, device=device) for width in widths
        )
        self.layers: list[tuple[Tensor, Tensor]] = [(key, value)] * shape.num_layers

    @property
    def capacity(self) -> int:
        """Positions that each slot has now."""
        return self.layers[0][0].shape[2] if self.layers else self._shape.max_length

    def reserve(self, length: int) -> None:
        """Makes room for `length` positions in every slot, layer by layer, so that one layer at most exists twice."""
        assert length <= self._shape.max_length, f"{length} positions in a cache planned for {self._shape.max_length}"
        old = self.capacity
        if length <= old:
            return
        new = min(self._shape.max_length, max(length + GROWTH, old + old // 2))
        for number, (key, value) in enumerate(self.layers):
            self.layers[number] = (_lengthened(key, new), _lengthened(value, new))

    def write(self, layer: int, slots: Tensor, positions: Tensor, key: Tensor, value: Tensor) -> None:
        """Stores `key` and `value` [tokens, kv heads, head_dim] of one layer at (slot, position) of each token."""
        self.layers[layer][0][slots, :, positions] = key
        self.layers[layer][1][slots, :, positions] = value

    def copy(self, copies: Sequence[SlotCopy]) -> None:
        """Does all copies at once: no slot may be both source and destination."""
        length = max((copy.length for copy in copies), default=0)
        if length == 0:
            return
        sources = [copy.source for copy in copies]
        destinations = [copy.destination for copy in copies]
        assert not set(sources) & set(destinations), "a slot is copied from and to at once"
        # Made once: as lists they would be sent to the device again for every layer.
        table = torch.tensor([sources, destinations], device=self.layers[0][0].device)
        for layer in self.layers:
            for part in layer:
                part[table[1], :, :length] = part[table[0], :, :length]


def _lengthened(part: Tensor, length: int) -> Tensor:
    """Keys or values with room for `length` positions."""
    larger = part.new_zeros((*part.shape[:2], length, part.shape[3]))
    larger[:, :, : part.shape[2]] = part
    return larger
