"""Which replica generates which sequences of a step, and which rank then sends them to whom. Pure arithmetic.

Every rank computes the same, from what all ranks know.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megappo.engines.rollout import Replicas
from megappo.parallel.exchange import Routes


def deal(costs: Mapping[int, int], num_samples: int, num_replicas: int) -> list[list[int]]:
    """The positions of each replica, ascending. `costs` has the tokens of each position at its longest.

    The samples of one prompt (position // num_samples) stay together, for their prompt is then computed once. The
    costliest prompt comes first, each to the replica with the least work so far (Graham 1969: at most 4/3 of the best).
    """
    prompts: dict[int, list[int]] = {}
    for position in sorted(costs):
        prompts.setdefault(position // num_samples, []).append(position)
    work = {prompt: sum(costs[position] for position in positions) for prompt, positions in prompts.items()}
    dealt: list[list[int]] = [[] for _ in range(num_replicas)]
    loads = [0] * num_replicas
    for prompt in sorted(prompts, key=lambda prompt: (-work[prompt], prompt)):
        least = min(range(num_replicas), key=lambda replica: (loads[replica], replica))
        loads[least] += work[prompt]
        dealt[least] += prompts[prompt]
    return [sorted(positions) for positions in dealt]


@dataclass(frozen=True)
class Delivery:
    """One rank's part in bringing sequences from the replicas that generated them to the ranks that train on them.

    Rows are numbers into the positions of the rank's own replica. `arrivals` are the positions that it receives, in
    the order of their arrival: senders ascending, each sender's positions ascending.
    """

    routes: Routes
    arrivals: tuple[int, ...]


def plan_delivery(
    rank: int, grid: Tensor, replicas: Replicas, dealt: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]
) -> Delivery:
    """`grid` is the mesh's [pp, dp, …] of ranks, `dealt` the positions of each replica, `wanted` those of each
    data-parallel rank, all of whose ranks receive them.
    """
    holders = [grid[:, dp_rank].flatten().tolist() for dp_rank in range(len(wanted))]
    own = next(dp_rank for dp_rank, ranks in enumerate(holders) if rank in ranks)
    owner = {position: dp_rank for dp_rank, positions in enumerate(wanted) for position in positions}

    number = replicas.of(rank)
    rows: dict[int, list[int]] = {}
    for row, position in enumerate(dealt[number]):
        rows.setdefault(owner[position], []).append(row)
    sends: list[tuple[int, ...]] = [()] * grid.numel()
    for dp_rank, rows_of_owner in rows.items():
        for receiver, sender in _senders(holders[dp_rank], replicas.groups[number], dp_rank).items():
            if sender == rank:
                sends[receiver] = tuple(rows_of_owner)

    arrivals: dict[int, list[int]] = {}
    for group, positions in zip(replicas.groups, dealt, strict=True):
        coming = [position for position in positions if owner[position] == own]
        if coming:
            arrivals[_senders(holders[own], group, own)[rank]] = coming
    receives = tuple(len(arrivals.get(sender, ())) for sender in range(grid.numel()))
    return Delivery(
        Routes(tuple(sends), receives), tuple(position for sender in sorted(arrivals) for position in arrivals[sender])
    )


def _senders(receivers: Sequence[int], members: Sequence[int], first: int) -> dict[int, int]:
    """Which member of a replica sends to each receiver: itself where it is one, else the members in turn from the
    `first`-th on, so that each sends about as much as the others."""
    outside = [receiver for receiver in receivers if receiver not in members]
    return {receiver: receiver for receiver in receivers if receiver in members} | {
        receiver: members[(first + turn) % len(members)] for turn, receiver in enumerate(outside)
    }
