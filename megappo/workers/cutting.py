"""Cuts a rank's part of a batch into micro-batches, as many as on every other data-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megappo.experience.batch import ExperienceBatch
from megappo.experience.cut import Cut, TokenParts, cut_by_tokens
from megappo.experience.micro import micro_batches
from megappo.experience.packed import packed_micro_batches
from megappo.parallel.collectives import max_over
from megappo.parallel.context import context_cut
from megappo.parallel.mesh import Mesh


@dataclass(frozen=True)
class Cutter:
    """The micro-batches of one kind of pass: `size` sequences each, padded or `packed`; or packed up to `max_tokens`
    tokens each on every context-parallel rank, where that is given."""

    mesh: Mesh
    size: int
    packed: bool = False
    max_tokens: int | None = None

    def __call__(self, batch: ExperienceBatch) -> Cut:
        """A collective call over the data-parallel ranks where micro-batches are cut by tokens: a pipeline, and
        experts that ranks share, need as many on each of them."""
        alignment, device = self.mesh.sequence_alignment, self.mesh.device
        context = context_cut(self.mesh)
        if self.max_tokens is None:
            in_order = packed_micro_batches if self.packed else micro_batches
            return Cut(in_order(batch, self.size, alignment=alignment, device=device, context=context))
        parts = TokenParts.of(batch, self.max_tokens * context.size // alignment * alignment, context)
        most = max_over(self.mesh.dp_group, device)(torch.tensor([len(parts.fewest)], dtype=torch.int64))
        number = int(most[0])
        if self.mesh.vpp > 1:
            number += -number % self.mesh.pp  # Megatron's interleaved schedule takes a multiple of it
        return cut_by_tokens(batch, parts.of_number(number), alignment=alignment, device=device, context=context)
