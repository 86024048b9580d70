"""Micro-batches without padding between sequences: all of them one after another in a single row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from megappo.experience.batch import ExperienceBatch
from megappo.experience.context import WHOLE, ContextCut
from megappo.experience.micro import MicroBatch


class PackedMicroBatch(MicroBatch):
    """Sequences of one forward pass in one row of `length` tokens, of which the last few may be padding.

    Everything that is [b, length] in a padded micro-batch is [1, length] here. No attention crosses from one sequence
    to the next: `boundaries` go to the model, and positions begin anew. What is read one place before a `predicted`
    token is of its own sequence, whose first token is not `predicted`. Under context parallelism each sequence is
    padded to what its cut divides.
    """

    @property
    def token_ids(self) -> Tensor:
        return self._row(self.rows.token_ids)

    @property
    def position_ids(self) -> Tensor:
        starts = torch.repeat_interleave(self.rows.cu_seqlens[:-1], self.rows.lengths)
        return self._row(torch.arange(self.rows.num_tokens) - starts)

    @property
    def response_mask(self) -> Tensor:
        return self._row(self.rows.response_mask)

    @property
    def predicted(self) -> Tensor:
        mask = self.response_mask.clone()
        mask[:, self._ends[:-1].to(mask.device)] = False
        return mask

    def over_sequence(self, view: Tensor) -> Tensor:
        owner = torch.repeat_interleave(torch.arange(self.num_sequences), self.rows.lengths).to(view.device)
        sums = view.new_zeros(self.num_sequences).index_add(0, owner, self.flat(view))
        return self._row(sums[owner])

    def view(self, name: str) -> Tensor:
        return self._row(self.rows.get(name))

    def flat(self, view: Tensor) -> Tensor:
        """[1, length] → [tokens of these rows], on the model's device."""
        if self.context.size > 1:
            return view[0, self._places.to(view.device)]
        return view[0, : self.rows.num_tokens]

    @property
    def boundaries(self) -> Tensor:
        """[sequences + 1] int32 on the model's device: where each begins, and the end; padding is a sequence too."""
        ends = self._ends
        if self.length > int(ends[-1]):
            ends = torch.cat([ends, torch.tensor([self.length])])
        return ends.to(self.device, torch.int32)

    @property
    def _ends(self) -> Tensor:
        """[sequences + 1] int64: where each sequence begins, and the last one's padding ends."""
        return padded_ends(self.rows, self.context)

    @property
    def _places(self) -> Tensor:
        """[tokens] int64: where the tokens of the sequences stand in the row."""
        shift = self._ends[:-1] - self.rows.cu_seqlens[:-1]
        return torch.arange(self.rows.num_tokens) + torch.repeat_interleave(shift, self.rows.lengths)

    def _row(self, flat: Tensor) -> Tensor:
        if self.context.size > 1:
            row = flat.new_zeros(self.length, *flat.shape[1:])
            return row.index_put((self._places.to(flat.device),), flat)[None].to(self.device)
        return pad(flat, (0, self.length - self.rows.num_tokens))[None].to(self.device)


def padded_ends(rows: ExperienceBatch, context: ContextCut) -> Tensor:
    """[sequences + 1] int64: `cu_seqlens` of sequences that are padded to what the cut over ranks divides."""
    unit = context.alignment
    if unit == 1:
        return rows.cu_seqlens
    lengths = -(-rows.lengths // unit) * unit
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def packed_micro_batches(
    batch: ExperienceBatch,
    size: int,
    *,
    alignment: int = 1,
    device: torch.device | None = None,
    context: ContextCut = WHOLE,
) -> list[MicroBatch]:
    """Like `micro_batches`, without padding between the sequences."""
    packed: list[MicroBatch] = []
    for start in range(0, batch.num_sequences, size):
        rows = batch.rows(start, min(start + size, batch.num_sequences))
        length = max(-(-int(padded_ends(rows, context)[-1]) // alignment) * alignment, alignment)
        packed.append(PackedMicroBatch(rows, length, device or torch.device("cpu"), context))
    return packed
