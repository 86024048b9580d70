"""Carries a plan out: binds aliases, copies locally, and moves the rest in buckets, the next one in flight meanwhile.

Works on gloo and NCCL. Everything that can be known before the first switch is made once: messages are views of the
training shards and of the destination's memory. Where the latter has moved they are made anew.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megappo.engines.hybrid.copies import DeviceCopies, paired, widened
from megappo.engines.hybrid.lost_ranks import SwitchError, await_device, lost_ranks_named, time_limit
from megappo.engines.hybrid.messages import Bucket, Message, Views, bucketed, pack, unpack
from megappo.engines.hybrid.plan import Planner
from megappo.engines.hybrid.staging import DevicePeak, MemoryMeter
from megappo.engines.hybrid.transfers import Transfer, Way
from megappo.engines.rollout import WorstTensor
from megappo.models.weight_map import WeightClass

__all__ = ["Destination", "Moved", "Sources", "Switch", "SwitchError", "widened"]


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

    def has_moved(self) -> bool:
        """Whether a parameter is not where `view` found it any more; asked for in every run."""
        ...

    def current(self, transfer: Transfer) -> Views | None:
        """The rows of `transfer` as the engine has them now, shaped as those of the source; None where it has no such
        rows. Without an effect."""
        ...


@dataclass
class Moved:
    """Bytes of one switch on this rank. `peak_bytes` is the most memory beyond parameters that was taken at once,
    measured; `extra_bytes` what the plan allows (0 without one)."""

    aliased: int = 0
    copied: int = 0
    sent: int = 0
    received_by_class: Counter[WeightClass] = field(default_factory=Counter)
    peak_bytes: int = 0
    extra_bytes: int = 0

    @property
    def received(self) -> int:
        return self.received_by_class.total()


@dataclass
class _InFlight:
    """A bucket under way: its requests, and the memory that its messages are received into and sent from."""

    number: int
    requests: list[dist.Work]
    received: list[tuple[Message, Tensor]]
    sent_bytes: int


class Switch:
    """The transfers of one rank between two layouts, ready to be run any number of times.

    `group` holds all ranks of the training grid. Every rank runs its own together.
    """

    def __init__(
        self, planner: Planner, rank: int, sources: Sources, destination: Destination, group: ProcessGroup | None
    ) -> None:
        self._planner = planner
        self._rank = rank
        self._sources = sources
        self._destination = destination
        self._group = group
        self._has_run = False
        self._prepare()

    def _prepare(self) -> None:
        """Finds all memory that is read and written."""
        self._aliases: list[tuple[Transfer, Views]] = []
        self._local: list[tuple[Transfer, Views]] = []
        copied: list[tuple[Tensor, Tensor]] = []
        self._received: list[tuple[Transfer, Views]] = []
        for transfer in self._planner.receives(self._rank):
            if transfer.way is Way.GATHER:
                self._received.append((transfer, (self._destination.view(transfer),)))
                continue
            views = self._sources.views(transfer)
            if transfer.way is Way.ALIAS:
                self._aliases.append((transfer, views))
            else:
                self._local.append((transfer, views))
                copied += paired((self._destination.view(transfer),), views)
        self._copies = DeviceCopies(copied)
        self._aliased_bytes = sum(view.nbytes for _, views in self._aliases for view in views)
        sends = [(transfer, self._sources.views(transfer)) for transfer in self._planner.sends(self._rank)]
        self._buckets = bucketed(self._planner.buckets.count, self._received, sends)
        messages = (message for bucket in self._buckets for message in (*bucket.receives, *bucket.sends))
        self._device = next((message.parts[0].device for message in messages), torch.device("cpu"))
        """Of what is sent and received, if anything is."""

    @property
    def extra_bytes(self) -> int:
        """Memory beyond parameters that a run takes at most, by the plan."""
        return self._planner.extra_bytes

    @torch.no_grad()
    def run(self) -> Moved:
        """Makes the training weights of this moment the generation layout's. Raises SwitchError."""
        if self._destination.has_moved():
            self._prepare()
        moved = Moved(aliased=self._aliased_bytes, extra_bytes=self.extra_bytes)
        if self._has_run:
            self._copies.record()
        meter, peak = MemoryMeter(), None
        if self._device.type == "cuda":
            peak = DevicePeak()
        self._run_buckets(moved, meter)
        # Last, while a GPU still copies: where nothing has changed, this only looks.
        for transfer, views in self._aliases:
            self._destination.alias(transfer, views)
        self._has_run = True
        moved.peak_bytes = max(meter.peak_bytes, peak.extra_bytes if peak is not None else 0)
        assert moved.peak_bytes <= self.extra_bytes, (
            f"the switch took {moved.peak_bytes:,} bytes beyond the parameters, its plan has {self.extra_bytes:,}"
        )
        return moved

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
        for transfer, views in self._local:
            mine = self._destination.current(transfer)
            if mine is None:
                found[transfer.target_name] = torch.inf
                continue
            for target, source in paired(mine, views):
                compare(transfer, target, source)
        held: list[tuple[Transfer, Views]] = []
        for transfer, views in self._received:
            now = self._destination.current(transfer)
            if now is None or now[0].dtype != views[0].dtype:
                found[transfer.target_name] = torch.inf
            held.append((transfer, views if transfer.target_name in found or now is None else now))
        parts = bucketed(len(self._buckets), held, [])
        for number, (bucket, ours) in enumerate(zip(self._buckets, parts, strict=True)):
            scratch = [
                replace(message, parts=tuple(torch.empty_like(part) for part in message.parts))
                for message in ours.receives
            ]
            again = Bucket(scratch, bucket.sends)
            with lost_ranks_named(self._named(number)):
                staging = torch.empty(again.staging_bytes, dtype=torch.uint8, device=self._device)
                self._finish(self._post(number, again, staging), Moved())
            for message, copy in zip(ours.receives, scratch, strict=True):
                for transfer, part, theirs in zip(message.transfers, message.parts, copy.parts, strict=True):
                    compare(transfer, part, theirs)
        return found

    def _run_buckets(self, moved: Moved, meter: MemoryMeter) -> None:
        """The buckets, one ahead of the other; the copies on the device while the first one is under way."""
        staging = self._staging(meter)
        current, last = None, None
        for number, bucket in enumerate([*self._buckets, None]):
            following = None
            if bucket is not None:
                with lost_ranks_named(self._named(number)):
                    following = self._post(number, bucket, staging[number % 2])
            if number == 0:
                moved.copied = self._copies.run()
            if current is not None:
                with lost_ranks_named(self._named(current.number)):
                    self._finish(current, moved)
                last = current if current.requests else last
            current = following
        if last is not None and self._device.type == "cuda":
            with lost_ranks_named(self._named(last.number)):
                await_device(last.requests, time_limit(self._group, self._device))

    def _staging(self, meter: MemoryMeter) -> list[Tensor]:
        """Memory for the even and for the odd buckets, empty where none are packed. Not a piece a message: NCCL lets go
        of what it was given when its stream is done, and the host is ahead of that."""
        sizes = [max((bucket.staging_bytes for bucket in self._buckets[turn::2]), default=0) for turn in (0, 1)]
        return [meter.allocate(size, self._device) for size in sizes]

    def _named(self, number: int) -> str:
        return f"bucket {number} of {len(self._buckets)}"

    def _post(self, number: int, bucket: Bucket, staging: Tensor) -> _InFlight:
        operations: list[dist.P2POp] = []
        received: list[tuple[Message, Tensor]] = []
        for message in bucket.receives:
            tensor = bucket.memory_of(message, staging)
            received.append((message, tensor))
            operations.append(dist.P2POp(dist.irecv, tensor, message.peer, self._group))
        for message in bucket.sends:
            tensor = bucket.memory_of(message, staging)
            if not message.is_direct:
                pack(message, tensor)
            operations.append(dist.P2POp(dist.isend, tensor, message.peer, self._group))
        requests = dist.batch_isend_irecv(operations) if operations else []
        return _InFlight(number, requests, received, sum(message.nbytes for message in bucket.sends))

    def _finish(self, bucket: _InFlight, moved: Moved) -> None:
        """Waits for a bucket and unpacks it."""
        for request in bucket.requests:
            request.wait()
        for message, tensor in bucket.received:
            for part, transfer in zip(message.parts, message.transfers, strict=True):
                moved.received_by_class[transfer.weight_class] += part.nbytes
            if not message.is_direct:
                unpack(message, tensor)
        moved.sent += bucket.sent_bytes
