"""A batch in micro-batches, and the way back: so many sequences each in order, or so many tokens each in any order.

How many micro-batches other ranks have is not known here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.experience.batch import ExperienceBatch
from megappo.experience.context import WHOLE, ContextCut
from megappo.experience.micro import MicroBatch
from megappo.experience.packed import PackedMicroBatch, padded_ends
from megappo.experience.partition import balanced_parts, parts_within


@dataclass(frozen=True)
class Cut:
    """The micro-batches of one pass over a batch. `places` [tokens] says where their tokens stand in the batch, one
    micro-batch after another; None is in the batch's own order."""

    micros: Sequence[MicroBatch]
    places: Tensor | None = None

    def restored(self, flat: Tensor) -> Tensor:
        """Results of all micro-batches, [tokens] or more with those of empty ones at the end → [tokens] in the batch's
        order."""
        if self.places is None:
            return flat
        result = torch.empty_like(flat[: len(self.places)])
        result[self.places] = flat[: len(self.places)]
        return result


@dataclass(frozen=True)
class TokenParts:
    """Which sequences of a batch share a micro-batch of at most `limit` tokens: as few micro-batches as may be, or more
    of them where another rank needs more."""

    lengths: tuple[int, ...]
    limit: int
    fewest: list[list[int]]

    @classmethod
    def of(cls, batch: ExperienceBatch, limit: int, context: ContextCut = WHOLE) -> TokenParts:
        lengths = tuple(padded_ends(batch, context).diff().tolist())
        return cls(lengths, limit, parts_within(lengths, limit))

    def of_number(self, number: int) -> list[list[int]]:
        """`number` parts, at least as many as there are in `fewest`; the last ones are empty where sequences are too
        few, or where the parts of that number are over the limit."""
        assert number >= len(self.fewest), f"{number} micro-batches can't hold what needs {len(self.fewest)}"
        parts = balanced_parts(self.lengths, number)
        if any(sum(self.lengths[place] for place in places) > self.limit for places in parts):
            return self.fewest + [[]] * (number - len(self.fewest))
        return parts


def cut_by_tokens(
    batch: ExperienceBatch,
    parts: Sequence[Sequence[int]],
    *,
    alignment: int,
    device: torch.device,
    context: ContextCut = WHOLE,
) -> Cut:
    """A packed micro-batch for each part, whose numbers are rows of the batch; those of empty parts change nothing."""
    full = [batch.taken(rows) for rows in parts if rows]
    empty = [nothing_like(batch)] * (len(parts) - len(full))
    micros = [
        PackedMicroBatch(rows, aligned(int(padded_ends(rows, context)[-1]), alignment), device, context)
        for rows in (*full, *empty)
    ]
    return Cut(micros, torch.cat([batch.token_places(rows) for rows in parts if rows] or [batch.token_ids[:0]]))


def nothing_like(batch: ExperienceBatch) -> ExperienceBatch:
    """One sequence of one token and no response, with all fields that the batch has: no loss, no gradient, no part in
    any mean."""
    fields: dict[str, Tensor | None] = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        # An expert's number that is none: the router chooses.
        filler = -1 if field.name == "routed_experts" else 0
        fields[field.name] = value if value is None else value.new_full((1, *value.shape[1:]), filler)
    fields["cu_seqlens"] = torch.tensor([0, 1])
    return ExperienceBatch(**fields)  # type: ignore[arg-type]


def empty_like(micro: MicroBatch, alignment: int) -> MicroBatch:
    """A micro-batch of the same kind with one such sequence, as short as may be."""
    return dataclasses.replace(micro, rows=nothing_like(micro.rows), length=alignment)


def aligned(length: int, alignment: int) -> int:
    """The smallest multiple of the alignment that is at least `length` and not 0."""
    return max(-(-length // alignment) * alignment, alignment)
