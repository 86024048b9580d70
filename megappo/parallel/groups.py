"""Process groups beside Megatron's own: for layouts of the same ranks that are not training's."""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup


def own_group(groups: Sequence[Sequence[int]]) -> ProcessGroup:
    """Makes all `groups` of global ranks, and returns the one that this rank is in, its ranks in ascending order.

    Every rank of the world calls it with the same groups. They are made by all ranks and not by their members alone:
    then torch (2.13) names a group by how many its members have seen, which differs from rank to rank where Megatron
    made groups of some pipeline stages only, and the members wait for each other for ever.
    """
    rank, own = dist.get_rank(), None
    for ranks in groups:
        made = dist.new_group(sorted(ranks))
        if rank in ranks:
            own = made
    assert isinstance(own, ProcessGroup), f"rank {rank} is in none of the groups {groups}"
    return own
