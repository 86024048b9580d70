"""What a checkpoint holds of a rank's part of a parameter that is cut over data-parallel ranks (`sharded.py`).

Megatron describes the TP rank's whole shard, as one sharded tensor or, by a factory, as several whose rows lie one
above the other (gate and up of a feed-forward). A part is a box in it, which may begin and end within any of them: the
grid is irregular, as Megatron calls one whose tensors each say where they stand, and parts of any sizes have a place.
"""

from __future__ import annotations

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor


class PartState(ShardedTensorFactory):
    """Makes the sharded tensors of a part, all under `key`, and the part of what was loaded into them."""


def part_state(whole: Any, data: Tensor, axis: int, start: int) -> PartState:
    """The entry of this rank's part `data`, which begins at `start` along `axis` of the TP rank's shard.

    `whole`: Megatron's entry of that shard, made of a tensor of its shape that needs no memory. `data` isn't empty. The
    optimizer's states of the part get an entry by being put in the place of `data`.
    """
    shape = whole.data.shape
    assert isinstance(whole, ShardedTensor | ShardedTensorFactory), f"a checkpoint has no way to hold a part of {whole}"

    def build(key: str, part: Tensor, *settings: Any) -> list[ShardedTensor]:
        if isinstance(whole, ShardedTensor):
            return _pieces([replace(whole, key=key)], part, axis, start)
        like = torch.empty(shape, dtype=part.dtype, device="meta")
        tensors = list(nested_values(whole.build_fn(key, like, *settings)))
        assert sum(tensor.local_shape[0] for tensor in tensors) == shape[0], f"{key} is no tensors of rows"
        assert all(tensor.key == key for tensor in tensors), f"{key} is tensors of other names"
        return _pieces(tensors, part, axis, start)

    def merge(loaded: list[Tensor]) -> Tensor:
        return torch.cat([piece.flatten(0, piece.dim() - len(shape)) for piece in loaded])

    return PartState(whole.key, data, build, merge, whole.replica_id)


def _pieces(tensors: Iterable[ShardedTensor], data: Tensor, axis: int, start: int) -> list[ShardedTensor]:
    """What the part `data` has of each of `tensors`, which lie one above the other; without those it has nothing of."""
    first, found, above = start if axis == 0 else 0, [], 0
    for tensor in tensors:
        begin, end = max(above, first), min(above + tensor.local_shape[0], first + data.shape[0])
        if begin < end:
            # Axes before the tensor's own, as that of the layers; in an irregular grid they have to be the data's.
            before = tensor.prepend_axis_num
            piece = data[begin - first : end - first]
            piece = piece.view(*(1,) * before, *piece.shape)
            offset = list(tensor.global_offset)
            offset[before] += begin - above
            if axis:
                offset[before + axis] += start
            found.append(
                replace(
                    tensor, data=piece, dtype=piece.dtype, local_shape=tuple(piece.shape), global_offset=tuple(offset),
                    axis_fragmentations=None, prepend_axis_num=0,
                    replica_id=(*tensor.replica_id[:-1], 0),  # of data-parallel ranks, none has what another one has
                )
            )  # fmt: skip
        above += tensor.local_shape[0]
    return found
