"""Micro-batches without padding between sequences: all of them one after another in a single row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import MicroBatch


class PackedMicroBatch(MicroBatch):
    """Sequences of one forward pass in one row of `length` tokens, of which the last few may be padding.

    Everything that is [b, length] in a padded micro-batch is [1, length] here. No attention crosses from one sequence
    to the next: `boundaries` go to the model, and positions begin anew. What is read one place before a `predicted`
    token is of its own sequence, whose first token is not `predicted`.
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
        mask[:, self.rows.cu_seqlens[:-1].to(mask.device)] = False
        return mask

    def over_sequence(self, view: Tensor) -> Tensor:
        owner = torch.repeat_interleave(torch.arange(self.num_sequences), self.rows.lengths).to(view.device)
        sums = view.new_zeros(self.num_sequences).index_add(0, owner, self.flat(view))
        return pad(sums[owner], (0, self.length - self.rows.num_tokens))[None]

    def view(self, name: str) -> Tensor:
        return self._row(self.rows.get(name))

    def flat(self, view: Tensor) -> Tensor:
        """[1, length] → [tokens of these rows], on the model's device."""
        return view[0, : self.rows.num_tokens]

    @property
    def boundaries(self) -> Tensor:
        """[sequences + 1] int32 on the model's device: where each begins, and the end; padding is a sequence too."""
        ends = self.rows.cu_seqlens
        if self.length > self.rows.num_tokens:
            ends = torch.cat([ends, torch.tensor([self.length])])
        return ends.to(self.device, torch.int32)

    def _row(self, flat: Tensor) -> Tensor:
        return pad(flat, (0, self.length - self.rows.num_tokens))[None].to(self.device)


def packed_micro_batches(
    batch: ExperienceBatch, size: int, *, alignment: int = 1, device: torch.device | None = None
) -> list[MicroBatch]:
    """Like `micro_batches`, without padding between the sequences."""
    packed: list[MicroBatch] = []
    for start in range(0, batch.num_sequences, size):
        rows = batch.rows(start, min(start + size, batch.num_sequences))
        length = max(-(-rows.num_tokens // alignment) * alignment, alignment)
        packed.append(PackedMicroBatch(rows, length, device or torch.device("cpu")))
    return packed
