"""What a checkpoint holds of parts of any size: laid where they say, they make up the whole of each tensor."""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from collections.abc import Iterator

import pytest
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from torch import Tensor

from megappo.models.part_state import PartState, part_state

LAYERS, TP = 2, 2


def parts(shard: Tensor, axis: int, dp: int) -> Iterator[tuple[int, Tensor]]:
    """(begin, part) of each rank that has rows or columns of the shard."""
    length = -(-shard.shape[axis] // dp)
    for begin in range(0, shard.shape[axis], length):
        yield begin, shard.narrow(axis, begin, min(length, shard.shape[axis] - begin)).contiguous()


def entry(shard: Tensor, tp_rank: int, layer: int, *, is_gated: bool) -> object:
    """Megatron's, made of a tensor without memory; rows are cut over TP ranks."""
    whole = torch.empty(shard.shape, device="meta")
    of_layer = (0, layer, LAYERS)
    made = ShardedTensor.from_rank_offsets("key", whole, of_layer, (1, tp_rank, TP), prepend_axis_num=1)
    made.replica_id = (0, 0, 1)
    return apply_swiglu_sharded_factory(made, (of_layer,)) if is_gated else made


def laid_out(tensors: list[ShardedTensor], shape: torch.Size) -> Tensor:
    """NaN where no tensor lies; they may not overlap."""
    found = torch.full(shape, torch.nan)
    for tensor in tensors:
        assert tensor.key == "key" and tensor.global_shape == tuple(shape) and tensor.replica_id == (0, 0, 0)
        assert tensor.data is not None and tensor.data.numel() > 0
        place = tuple(slice(o, o + n) for o, n in zip(tensor.global_offset, tensor.local_shape, strict=True))
        assert found[place].isnan().all()
        found[place] = tensor.data
    return found


@pytest.mark.parametrize(("axis", "dp"), [(0, 3), (0, 4), (0, 7), (0, 2), (1, 3)])
def test_rows_of_gate_and_up_come_to_where_the_whole_has_them(axis: int, dp: int) -> None:
    """A layer has 10 rows of gate and 10 of up; a TP rank 5 and 5, one above the other, in parts of 4, 4 and 2 at dp 3:
    the second has the last of gate and three of up. At dp 7 the parts have 2 rows, and two ranks have none."""
    whole = torch.arange(LAYERS * 20 * 3.0).view(LAYERS, 20, 3)
    tensors: list[ShardedTensor] = []
    for layer in range(LAYERS):
        for tp_rank in range(TP):
            gate, up = (whole[layer, first + 5 * tp_rank : first + 5 * tp_rank + 5] for first in (0, 10))
            shard = torch.cat([gate, up])
            for begin, part in parts(shard, axis, dp):
                state = part_state(entry(shard, tp_rank, layer, is_gated=True), part, axis, begin)
                tensors += (made := state.build())
                assert state.merge_fn([tensor.data for tensor in made]).equal(part)
    assert laid_out(tensors, whole.shape).equal(whole)


@pytest.mark.parametrize(("axis", "dp"), [(0, 3), (0, 2), (1, 3)])
def test_a_plain_tensor_and_its_moments(axis: int, dp: int) -> None:
    whole = torch.arange(LAYERS * 14 * 3.0).view(LAYERS, 14, 3)
    tensors: list[ShardedTensor] = []
    for layer in range(LAYERS):
        for tp_rank in range(TP):
            shard = whole[layer, 7 * tp_rank : 7 * tp_rank + 7]
            for begin, part in parts(shard, axis, dp):
                state = part_state(entry(shard, tp_rank, layer, is_gated=False), torch.zeros_like(part), axis, begin)
                assert isinstance(state, PartState)
                state.data = part  # as Megatron puts the optimizer's there
                tensors += state.build()
    assert laid_out(tensors, whole.shape).equal(whole)
