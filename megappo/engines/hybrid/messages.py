"""What goes over the wire: the parts of transfers, grouped into messages and buckets of views.

Both ranks of a message cut it alike without talking: by the order of transfers, by their sizes, never by where memory
lies. `execute.py` sends them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megappo.engines.hybrid.transfers import Transfer

DIRECT_BYTES = 1 << 20
"""Parts of at least this size are messages of their own, which need no copy where their memory is in one piece."""

Views = tuple[Tensor, ...]
"""The same rows on one side of a transfer: one view, or one an expert, [1, rows, columns], where experts are separate
parameters."""


@dataclass(frozen=True)
class Message:
    """Parts that travel together between this rank and `peer`; a single part may be sent from where it lies.

    `transfers` says of each part what it belongs to.
    """

    peer: int
    parts: tuple[Tensor, ...]
    transfers: tuple[Transfer, ...]

    @property
    def num_elements(self) -> int:
        return sum(part.numel() for part in self.parts)

    @property
    def nbytes(self) -> int:
        return self.num_elements * self.parts[0].element_size()

    @property
    def is_direct(self) -> bool:
        return len(self.parts) == 1 and self.parts[0].is_contiguous()

    @property
    def staging_bytes(self) -> int:
        return 0 if self.is_direct else self.nbytes


@dataclass
class Bucket:
    """Messages of one rank that are under way together."""

    receives: list[Message] = field(default_factory=list)
    sends: list[Message] = field(default_factory=list)

    @property
    def staging_bytes(self) -> int:
        return sum(message.staging_bytes for message in (*self.receives, *self.sends))


def bucketed(
    count: int, receives: Sequence[tuple[Transfer, Views]], sends: Sequence[tuple[Transfer, Views]]
) -> list[Bucket]:
    """Every bucket's messages; empty buckets are left in, so that all ranks count alike."""
    buckets = [Bucket() for _ in range(count)]
    for is_send, transfers in ((False, receives), (True, sends)):
        parts: dict[tuple[int, int], list[tuple[Transfer, Views]]] = {}
        for transfer, views in transfers:
            peer = transfer.target_rank if is_send else transfer.source_rank
            for index, bucket in enumerate(transfer.buckets):
                part = _part(views, index, len(transfer.buckets))
                if part:
                    parts.setdefault((bucket, peer), []).append((transfer, part))
        for (bucket, peer), several in parts.items():
            messages = buckets[bucket].sends if is_send else buckets[bucket].receives
            messages += _messages(peer, several)
    return buckets


def _messages(peer: int, several: Iterable[tuple[Transfer, Views]]) -> list[Message]:
    """Large parts by themselves, the others of a type together. Both ranks cut alike, by size."""
    messages: list[Message] = []
    small: dict[torch.dtype, list[tuple[Tensor, Transfer]]] = {}
    for transfer, views in several:
        if sum(view.nbytes for view in views) >= DIRECT_BYTES:
            messages.append(Message(peer, views, (transfer,) * len(views)))
        else:
            small.setdefault(views[0].dtype, []).extend((view, transfer) for view in views)
    for of_type in small.values():
        tensors, transfers = zip(*of_type, strict=True)
        messages.append(Message(peer, tensors, transfers))
    return messages


def _part(views: Views, index: int, count: int) -> Views:
    """Part `index` of `count` equal parts along the first dimension, or of the list of experts."""
    if len(views) > 1:
        start, stop = len(views) * index // count, len(views) * (index + 1) // count
        return views[start:stop]
    size = views[0].shape[0]
    start, stop = size * index // count, size * (index + 1) // count
    return (views[0][start:stop],) if stop > start else ()


def staging(message: Message) -> Tensor:
    """New memory for a message, flat."""
    part = message.parts[0]
    return torch.empty(message.num_elements, dtype=part.dtype, device=part.device)


def packed(message: Message) -> Tensor:
    """A copy of the message's parts in one piece."""
    flat = staging(message)
    torch._foreach_copy_(_slices(message, flat), list(message.parts))
    return flat


def unpack(message: Message, flat: Tensor) -> None:
    """Writes what was received to where it belongs."""
    torch._foreach_copy_(list(message.parts), _slices(message, flat))


def _slices(message: Message, flat: Tensor) -> list[Tensor]:
    """Views of `flat` in the parts' shapes, one after the other."""
    sizes = [part.numel() for part in message.parts]
    return [piece.view(part.shape) for piece, part in zip(flat.split(sizes), message.parts, strict=True)]
