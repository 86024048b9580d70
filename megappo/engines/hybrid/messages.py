"""What goes over the wire: the parts of transfers, grouped into messages and buckets of views.

Both ranks of a message cut it alike without talking: by the order of transfers, by their sizes, never by where memory
lies. `execute.py` sends them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from megappo.engines.hybrid.transfers import Lines, Transfer

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

    @cached_property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @cached_property
    def is_direct(self) -> bool:
        return len(self.parts) == 1 and self.parts[0].is_contiguous()


@dataclass
class Bucket:
    """Messages of one rank that are under way together."""

    receives: list[Message] = field(default_factory=list)
    sends: list[Message] = field(default_factory=list)

    @cached_property
    def places(self) -> dict[int, int]:
        """Where messages that are packed lie in the bucket's staging memory, in bytes, by the message's identity.

        They lie without gaps: those of whole 16 bytes first, so that they begin at 16, the others in the order of their
        elements' sizes.
        """
        packed = [message for message in (*self.receives, *self.sends) if not message.is_direct]
        packed.sort(key=lambda message: (message.nbytes % 16 > 0, -message.parts[0].itemsize))
        places, end = {}, 0
        for message in packed:
            places[id(message)] = end
            end += message.nbytes
        return places

    @cached_property
    def staging_bytes(self) -> int:
        return sum(message.nbytes for message in (*self.receives, *self.sends) if not message.is_direct)

    def memory_of(self, message: Message, staging: Tensor) -> Tensor:
        """Where a message is sent from or received: its own part, or its place in `staging`, flat."""
        if message.is_direct:
            return message.parts[0]
        start = self.places[id(message)]
        return staging[start : start + message.nbytes].view(message.parts[0].dtype)


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
                blocks = [(transfer, _block(transfer, views, lines)) for lines in transfer.blocks(index)]
                if blocks:
                    parts.setdefault((bucket, peer), []).extend(blocks)
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


def _block(transfer: Transfer, views: Views, lines: Lines) -> Views:
    if transfer.experts is None:
        return (views[0][lines.start : lines.stop],)
    if len(views) == 1:
        return (views[0][lines.first : lines.last, lines.start : lines.stop],)
    return tuple(view[:, lines.start : lines.stop] for view in views[lines.first : lines.last])


def pack(message: Message, flat: Tensor) -> None:
    """Copies the message's parts into `flat`, one after the other."""
    torch._foreach_copy_(_slices(message, flat), list(message.parts))


def unpack(message: Message, flat: Tensor) -> None:
    """Writes what was received to where it belongs."""
    torch._foreach_copy_(list(message.parts), _slices(message, flat))


def _slices(message: Message, flat: Tensor) -> list[Tensor]:
    """Views of `flat` in the parts' shapes, one after the other."""
    sizes = [part.numel() for part in message.parts]
    return [piece.view(part.shape) for piece, part in zip(flat.split(sizes), message.parts, strict=True)]
