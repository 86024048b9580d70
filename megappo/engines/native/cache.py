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


class KVCache:
    """Keys and values of this rank's layers and heads: `layers[i]` is [2, slots, kv heads, positions, head_dim].

    Memory starts at zero, so that a position that was never written is finite: attention masks it, and 0 · NaN is NaN.
    """

    def __init__(self, shape: CacheShape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        empty = torch.zeros(2, shape.num_slots, shape.num_kv_heads, 0, shape.head_dim, dtype=dtype, device=device)
        self.layers: list[Tensor] = [empty] * shape.num_layers

    @property
    def capacity(self) -> int:
        """Positions that each slot has now."""
        return self.layers[0].shape[3] if self.layers else self._shape.max_length

    def reserve(self, length: int) -> None:
        """Makes room for `length` positions in every slot, layer by layer, so that one layer at most exists twice."""
        assert length <= self._shape.max_length, f"{length} positions in a cache planned for {self._shape.max_length}"
        old = self.capacity
        if length <= old:
            return
        new = min(self._shape.max_length, max(length + GROWTH, old + old // 2))
        for number, layer in enumerate(self.layers):
            larger = layer.new_zeros((*layer.shape[:3], new, layer.shape[4]))
            larger[:, :, :, :old] = layer
            self.layers[number] = larger

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
        table = torch.tensor([sources, destinations], device=self.layers[0].device)
        for layer in self.layers:
            layer[:, table[1], :, :length] = layer[:, table[0], :, :length]
