"""Rows of uneven length go from the ranks that have them to the ranks that need them, in one all-to-all a column.

Which rank sends what is the caller's plan, known to sender and receiver alike. Not here: what the rows mean.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

T = TypeVar("T")


@dataclass(frozen=True)
class Routes:
    """One rank's part of the plan: `sends[d]` are numbers of own rows that go to rank d of the group, in that order;
    `receives[s]` is how many rows come from rank s."""

    sends: tuple[tuple[int, ...], ...]
    receives: tuple[int, ...]


class RowExchange:
    """Moves the columns of a table along the same routes; every rank of the group makes the same calls.

    Received rows are in the order of their senders, and in the sender's order within. Tensors are on the CPU: the group
    must have a CPU backend (gloo alone, or beside NCCL).
    """

    def __init__(self, group: ProcessGroup, routes: Routes) -> None:
        assert len(routes.sends) == len(routes.receives) == group.size(), "routes name every rank of the group"
        self._group = group
        self._routes = routes
        self._rows = torch.tensor([row for rows in routes.sends for row in rows], dtype=torch.int64)
        self.received_bytes = 0
        """Bytes of all columns so far, those that this rank sent to itself included."""

    def fixed(self, rows: Tensor) -> Tensor:
        """[rows, …] → [received rows, …]."""
        return self._exchange(rows[self._rows], [len(sent) for sent in self._routes.sends], list(self._routes.receives))

    def ragged(self, values: Tensor, lengths: Tensor, received_lengths: Tensor) -> Tensor:
        """Flat values of rows that have `lengths` [rows] each → flat values of the received rows.

        `received_lengths` [received rows] came over `fixed`.
        """
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).tolist()
        pieces = [values[starts[row] : starts[row + 1]] for row in self._rows.tolist()]
        sent = torch.cat(pieces) if pieces else values[:0]
        return self._exchange(
            sent,
            _sums(lengths[self._rows], [len(rows) for rows in self._routes.sends]),
            _sums(received_lengths, self._routes.receives),
        )

    def _exchange(self, sent: Tensor, sent_sizes: list[int], received_sizes: list[int]) -> Tensor:
        """`sent_sizes[d]` leading entries go to rank d."""
        received = torch.empty((sum(received_sizes), *sent.shape[1:]), dtype=sent.dtype)
        dist.all_to_all_single(received, sent.contiguous(), received_sizes, sent_sizes, group=self._group)
        self.received_bytes += received.nbytes
        return received


def exchange_objects(values: Sequence[T], peers: Sequence[int], group: ProcessGroup) -> list[T]:
    """`values[i]` goes to rank `peers[i]` of the group; what each of the peers has for this rank comes back, in their
    order. Pickled. The peers of a rank, itself among them, ascend and are each other's; every rank of the group makes
    the call, whichever peers it has."""
    assert len(values) == len(peers) and list(peers) == sorted(peers), "one value for each peer, and these ascend"
    contents = [pickle.dumps(value, pickle.HIGHEST_PROTOCOL) for value in values]
    row_of = {peer: (row,) for row, peer in enumerate(peers)}
    sends = tuple(row_of.get(rank, ()) for rank in range(group.size()))
    exchange = RowExchange(group, Routes(sends, tuple(len(rows) for rows in sends)))
    lengths = torch.tensor([len(content) for content in contents], dtype=torch.int64)
    arrived = exchange.fixed(lengths)
    received = exchange.ragged(torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8), lengths, arrived)
    return [pickle.loads(bytes(part.numpy())) for part in received.split(arrived.tolist())]


def _sums(lengths: Tensor, counts: Sequence[int]) -> list[int]:
    """The sum of each run of `counts[i]` consecutive lengths."""
    return [int(part.sum()) for part in lengths.split(list(counts))]
