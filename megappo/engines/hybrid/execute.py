"""Carries a plan out: binds aliases, copies locally, and moves the rest in buckets, the next one in flight meanwhile.

Works on gloo and NCCL. Everything that can be known before the first switch is made once: messages are views of the
training shards and of the destination's memory.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megappo.engines.hybrid.messages import Bucket, Message, Views, bucketed, packed, staging, unpack
from megappo.engines.hybrid.plan import Planner
from megappo.engines.hybrid.transfers import Transfer, Way
from megappo.engines.rollout import WorstTensor
from megappo.models.weight_map import WeightClass


class SwitchError(RuntimeError):
    """The weights could not be moved: a rank was lost, or did not answer in time. They are unusable until sent anew."""


class Sources(Protocol):
    """The training parameters of this rank."""

    def views(self, transfer: Transfer) -> Views:
        """The rows of `transfer` in the training shard."""
        ...


class Destination(Protocol):
    """The generation parameters of this rank."""

    def alias(self, transfer: Transfer, views: Views) -> None:
        """Makes rows of a parameter the training shard's own memory; asked for in every run."""
        ...

    def is_alias(self, transfer: Transfer, views: Views) -> bool:
        """Whether they (still) are."""
        ...

    def view(self, transfer: Transfer) -> Tensor:
        """Where the rows of `transfer` are to be written: [rows, columns], with experts [experts, rows, columns]."""
        ...


@dataclass
class Moved:
    """Bytes of one switch on this rank; `peak_bytes` is the staging memory that existed at once."""

    aliased: int = 0
    copied: int = 0
    sent: int = 0
    received_by_class: Counter[WeightClass] = field(default_factory=Counter)
    peak_bytes: int = 0

    @property
    def received(self) -> int:
        return self.received_by_class.total()


@dataclass
class _InFlight:
    """A bucket under way: its requests, and the staging memory of what has to be unpacked, or outlive the sending."""

    requests: list[dist.Work]
    received: list[tuple[Message, Tensor]]
    sent: list[Tensor]
    staging_bytes: int


class Switch:
    """The transfers of one rank between two layouts, ready to be run any number of times.

    `group` holds all ranks of the training grid. The destination's memory has to stay where it is between runs;
    where it does not, make a new one. Every rank runs its own together.
    """

    def __init__(
        self, planner: Planner, rank: int, sources: Sources, destination: Destination, group: ProcessGroup | None
    ) -> None:
        self._group = group
        self._aliases: list[tuple[Transfer, Views]] = []
        self._graph: torch.cuda.CUDAGraph | None = None
        self._has_run = False
        self._copies: list[tuple[Transfer, Tensor, Tensor]] = []
        self._destination = destination
        receives: list[tuple[Transfer, Views]] = []
        for transfer in planner.receives(rank):
            if transfer.way is Way.GATHER:
                receives.append((transfer, (destination.view(transfer),)))
                continue
            views = sources.views(transfer)
            if transfer.way is Way.ALIAS:
                self._aliases.append((transfer, views))
            else:
                pairs = _paired(destination.view(transfer), views)
                self._copies += [(transfer, target, source) for target, source in pairs]
        self._copied_bytes = sum(target.nbytes for _, target, _ in self._copies)
        self._aliased_bytes = sum(view.nbytes for _, views in self._aliases for view in views)
        sends = [(transfer, sources.views(transfer)) for transfer in planner.sends(rank)]
        self._buckets = bucketed(planner.buckets.count, receives, sends)
        sizes = [bucket.staging_bytes for bucket in self._buckets] + [0]
        self.extra_bytes = max((sum(sizes[index : index + 2]) for index in range(len(self._buckets))), default=0)
        """Staging memory that a run takes at most: that of two neighbouring buckets."""

    @torch.no_grad()
    def run(self) -> Moved:
        """Makes the training weights of this moment the generation layout's. Raises SwitchError."""
        moved = Moved(aliased=self._aliased_bytes)
        self._record_copies()
        self._run_buckets(moved)
        # Last, while a GPU still copies: where nothing has changed, this only looks.
        for transfer, views in self._aliases:
            self._destination.alias(transfer, views)
        self._has_run = True
        assert moved.peak_bytes <= self.extra_bytes, (
            f"the switch took {moved.peak_bytes} bytes of staging, its plan has {self.extra_bytes}"
        )
        return moved

    def _record_copies(self) -> None:
        """On a GPU, in the second run: hundreds of small copies, replayed from then on, cost one launch."""
        if self._graph is None and self._has_run and self._copies and self._copies[0][1].is_cuda:
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._write_copies()

    def _copy(self) -> int:
        """The copies on the device; returns their bytes."""
        if self._graph is not None:
            self._graph.replay()
        elif self._copies:
            self._write_copies()
        return self._copied_bytes

    def _write_copies(self) -> None:
        # In 8 bytes at a time where that is possible: a GPU copies 2-byte numbers at half of its memory's speed.
        pairs = [widened(target, source) for _, target, source in self._copies]
        by_type: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for target, source in pairs:
            by_type.setdefault(target.dtype, []).append((target, source))
        for several in by_type.values():
            targets, sources = zip(*several, strict=True)
            torch._foreach_copy_(targets, sources)

    def worst_tensor(self) -> WorstTensor | None:
        """The parameter that differs most on this rank; every rank calls it, after a run."""
        return max((WorstTensor(value, name) for name, value in self.differences().items()), default=None)

    @torch.no_grad()
    def differences(self) -> dict[str, float]:
        """Engine's parameter name → largest |generation − training|, of those that differ; every rank calls it.

        What other ranks hold is sent once more, into scratch memory, and compared. A parameter that should be the
        training shard's memory and is not any more counts as infinitely wrong.
        """
        found: dict[str, float] = {}

        def compare(transfer: Transfer, ours: Tensor, theirs: Tensor) -> None:
            # A NaN on one side has to count, and the largest of a NaN and a number is a NaN.
            worst = float((ours.float() - theirs.float()).abs().max().nan_to_num(nan=torch.inf))
            if worst:
                found[transfer.target_name] = max(worst, found.get(transfer.target_name, 0.0))

        for transfer, views in self._aliases:
            if not self._destination.is_alias(transfer, views):
                found[transfer.target_name] = torch.inf
        for transfer, target, source in self._copies:
            compare(transfer, target, source)
        for bucket in self._buckets:
            scratch = [
                replace(message, parts=tuple(torch.empty_like(part) for part in message.parts))
                for message in bucket.receives
            ]
            self._finish(self._post(Bucket(scratch, bucket.sends)), Moved())
            for message, copy in zip(bucket.receives, scratch, strict=True):
                for transfer, ours, theirs in zip(message.transfers, message.parts, copy.parts, strict=True):
                    compare(transfer, ours, theirs)
        return found

    def _run_buckets(self, moved: Moved) -> None:
        """The buckets, one ahead of the other; the copies on the device while the first one is under way."""
        held, current = 0, None
        for number, bucket in enumerate([*self._buckets, None]):
            with self._lost_ranks_named(number):
                following = self._post(bucket) if bucket is not None else None
            if number == 0:
                moved.copied = self._copy()
            held += following.staging_bytes if following is not None else 0
            moved.peak_bytes = max(moved.peak_bytes, held)
            if current is not None:
                with self._lost_ranks_named(number):
                    held -= self._finish(current, moved)
            current = following

    @contextmanager
    def _lost_ranks_named(self, number: int) -> Iterator[None]:
        """Makes errors of communication, while inside, SwitchErrors that say how far the switch was."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise  # no other rank's fault; it says itself how much was asked for
        except (RuntimeError, ValueError) as error:
            raise SwitchError(
                f"the weights could not be moved to the generation layout: bucket {number} of "
                f"{len(self._buckets)} failed, a rank is gone or did not answer in time ({error})"
            ) from error

    def _post(self, bucket: Bucket) -> _InFlight:
        operations: list[dist.P2POp] = []
        received: list[tuple[Message, Tensor]] = []
        sent: list[Tensor] = []
        for message in bucket.receives:
            tensor = message.parts[0] if message.is_direct else staging(message)
            received.append((message, tensor))
            operations.append(dist.P2POp(dist.irecv, tensor, message.peer, self._group))
        for message in bucket.sends:
            tensor = message.parts[0] if message.is_direct else packed(message)
            sent.append(tensor)
            operations.append(dist.P2POp(dist.isend, tensor, message.peer, self._group))
        requests = dist.batch_isend_irecv(operations) if operations else []
        return _InFlight(requests, received, sent, bucket.staging_bytes)

    def _finish(self, bucket: _InFlight, moved: Moved) -> int:
        """Waits for a bucket and unpacks it; the staging bytes that are free again."""
        for request in bucket.requests:
            request.wait()
        for message, tensor in bucket.received:
            for part, transfer in zip(message.parts, message.transfers, strict=True):
                moved.received_by_class[transfer.weight_class] += part.nbytes
            if not message.is_direct:
                unpack(message, tensor)
        moved.sent += sum(tensor.nbytes for tensor in bucket.sent)
        return bucket.staging_bytes


def widened(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Both as flat int64 views, where they lie in one piece each, begin and end at 8 bytes, and have one type."""
    if target.dtype != source.dtype or target.nbytes % 8:
        return target, source
    if not all(each.is_contiguous() and each.storage_offset() * each.itemsize % 8 == 0 for each in (target, source)):
        return target, source
    return target.flatten().view(torch.int64), source.flatten().view(torch.int64)


def _paired(target: Tensor, views: Views) -> list[tuple[Tensor, Tensor]]:
    """(destination, source) of each view; a target's first dimension is that of the experts where there are several."""
    if len(views) == 1:
        return [(target, views[0])]
    return list(zip(target.split(1), views, strict=True))
