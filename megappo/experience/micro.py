"""Cutting a batch into the padded pieces that one forward pass takes.

Which sequences form a minibatch is decided elsewhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.experience.batch import ExperienceBatch
from megappo.experience.context import WHOLE, ContextCut


@dataclass(frozen=True)
class MicroBatch:
    """Sequences of one forward pass, right-padded to `length` tokens (a multiple of the layout's alignment).

    `rows` keeps them flat; `token_ids` [b, length] and `position_ids` [b, length] are what the model takes. Per-token
    results of the model come back as [b, length] views and leave as flat tensors with `flat`. Under context parallelism
    the model takes and gives this rank's part of a view (`local`), and everything else sees the whole (`whole`).
    """

    rows: ExperienceBatch
    length: int
    device: torch.device
    context: ContextCut = WHOLE

    @property
    def num_sequences(self) -> int:
        return self.rows.num_sequences

    @property
    def token_ids(self) -> Tensor:
        return self.rows.padded(self.rows.token_ids, self.length).to(self.device)

    @property
    def position_ids(self) -> Tensor:
        return torch.arange(self.length, device=self.device).expand(self.num_sequences, -1)

    @property
    def response_mask(self) -> Tensor:
        """[b, length] bool; false in the padding."""
        return self.rows.padded(self.rows.response_mask, self.length).to(self.device)

    @property
    def predicted(self) -> Tensor:
        """[b, length] bool: response tokens that have a token of their own sequence before them."""
        mask = self.response_mask.clone()
        mask[:, 0] = False
        return mask

    def over_sequence(self, view: Tensor) -> Tensor:
        """[b, length] → [b, length]: at each token the sum over all of its sequence; `view` is 0 in the padding."""
        return view.sum(dim=-1, keepdim=True).expand_as(view)

    def view(self, name: str) -> Tensor:
        """The per-token field `name` as [b, length] on the model's device, 0 in the padding."""
        return self.rows.padded(self.rows.get(name), self.length).to(self.device)

    def flat(self, view: Tensor) -> Tensor:
        """[b, length] → [tokens of these rows], on the model's device."""
        return view[self.rows.is_token(self.length).to(view.device)]

    def local(self, view: Tensor) -> Tensor:
        """[b, length, …] → [b, length / cp, …]: what this context-parallel rank holds of it."""
        return view if self.context.size == 1 else self.context.local(view, self.boundaries)

    def whole(self, local: Tensor) -> Tensor:
        """[b, length / cp] → [b, length] from all context-parallel ranks, differentiable (`ContextCut.whole`)."""
        return local if self.context.size == 1 else self.context.whole(local, self.boundaries)

    @property
    def boundaries(self) -> Tensor:
        """[sequences of a row + 1] int32 on the model's device: where each begins, and the end."""
        return torch.tensor([0, self.length], dtype=torch.int32, device=self.device)


def micro_batches(
    batch: ExperienceBatch,
    size: int,
    *,
    alignment: int = 1,
    device: torch.device | None = None,
    context: ContextCut = WHOLE,
) -> list[MicroBatch]:
    """Consecutive micro-batches of `size` sequences (the last may be smaller), each padded to its longest sequence."""
    return list(_cut(batch, size, alignment, device or torch.device("cpu"), context))


def _cut(
    batch: ExperienceBatch, size: int, alignment: int, device: torch.device, context: ContextCut
) -> Iterator[MicroBatch]:
    for start in range(0, batch.num_sequences, size):
        rows = batch.rows(start, min(start + size, batch.num_sequences))
        longest = int(rows.lengths.max())
        yield MicroBatch(rows, max(-(-longest // alignment) * alignment, alignment), device, context)
