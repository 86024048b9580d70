"""Collectives over a mesh, as small typed functions. What they reduce or move is decided by the caller.

Tensors go to the mesh's device first: a group may have NCCL alone. Objects are pickled, for small things only.
"""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megappo.parallel.mesh import Mesh

T = TypeVar("T")


def sum_over(group: ProcessGroup, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A function that sums a tensor over the group, every rank getting the sum; its argument is left as it is.

    The result lies where the argument lies. Without a gradient: pass sums of detached values.
    """
    return _reduction(group, device, dist.ReduceOp.SUM)


def max_over(group: ProcessGroup, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Like `sum_over`, the largest value of each element."""
    return _reduction(group, device, dist.ReduceOp.MAX)


def _reduction(
    group: ProcessGroup, device: torch.device, operation: dist.ReduceOp.RedOpType
) -> Callable[[Tensor], Tensor]:
    def reduced(value: Tensor) -> Tensor:
        if group.size() == 1:
            return value
        result = value.detach().to(device, copy=True)
        dist.all_reduce(result, op=operation, group=group)
        return result.to(value.device)

    return reduced


def broadcast_from_last_stage(
    value: Tensor | None, mesh: Mesh, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Tensor:
    """`value` of the last pipeline stage, on every stage's `mesh.device`.

    Other stages give None; all of them know `shape` and `dtype`.
    """
    if mesh.is_last_stage:
        assert value is not None, "the last pipeline stage has the value to broadcast"
        assert tuple(value.shape) == shape, f"the value has shape {tuple(value.shape)}, the other stages expect {shape}"
        received = value.detach().to(mesh.device, dtype).contiguous()
    else:
        received = torch.empty(shape, dtype=dtype, device=mesh.device)
    if mesh.pp > 1:
        dist.broadcast(received, src=mesh.last_stage_rank, group=mesh.pp_group)
    return received


def broadcast_object(value: T | None, group: ProcessGroup, source: int) -> T:
    """The object of global rank `source`, on every rank of the group; the others' argument is ignored."""
    box: list[T | None] = [value]
    if group.size() > 1:
        dist.broadcast_object_list(box, src=source, group=group)
    return box[0]  # type: ignore[return-value]


def gather_objects(value: T, group: ProcessGroup) -> list[T]:
    """The objects of all ranks of the group, in the group's order, on every rank."""
    if group.size() == 1:
        return [value]
    gathered: list[T | None] = [None] * group.size()
    dist.all_gather_object(gathered, value, group=group)
    return gathered  # type: ignore[return-value]


def gather_objects_at(target: int, value: T, group: ProcessGroup) -> list[T]:
    """The objects of all ranks of the group, in the group's order, on its rank `target`; an empty list elsewhere."""
    if group.size() == 1:
        return [value]
    gathered: list[T | None] = [None] * group.size() if group.rank() == target else []
    dist.gather_object(value, gathered or None, group=group, group_dst=target)
    return gathered  # type: ignore[return-value]


def any_rank(flag: bool, mesh: Mesh) -> bool:
    """Whether `flag` is set on any rank of the world: the same answer on every rank, so that all take one branch."""
    if mesh.world_size == 1:
        return flag
    raised = torch.tensor([int(flag)], dtype=torch.int32, device=mesh.device)
    dist.all_reduce(raised, op=dist.ReduceOp.MAX)
    return bool(raised.item())
