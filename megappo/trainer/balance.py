"""Deals the sequences of a step anew over the data-parallel ranks, now that their lengths are known.

Which sequences form a minibatch stays as it is: only who works on them changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.experience.batch import PER_SEQUENCE, ExperienceBatch
from megappo.experience.partition import balanced_parts
from megappo.parallel.collectives import sum_over
from megappo.parallel.exchange import Routes, RowExchange
from megappo.parallel.mesh import Mesh
from megappo.planner.batch import BatchPlan
from megappo.trainer.loop import Step


class NoBalance:
    """Every rank works on the sequences that it has collected."""

    def deal(self, batch: ExperienceBatch, step: Step) -> ExperienceBatch:
        return batch


@dataclass(frozen=True)
class Balance:
    """Gives every data-parallel rank as many sequences of each minibatch as before, and about the same work.

    Work is estimated as 6 · hidden size · tokens + tokens²: what the matrices of a layer cost beside its attention.
    """

    mesh: Mesh
    plan: BatchPlan
    hidden_size: int

    def deal(self, batch: ExperienceBatch, step: Step) -> ExperienceBatch:
        """The sequences that this rank works on from now on, minibatch by minibatch, in the order of their positions.

        A collective call over the world.
        """
        lengths = torch.zeros(self.plan.sequences, dtype=torch.float64)
        lengths[batch.positions] = batch.lengths.double()
        tokens = [int(length) for length in sum_over(self.mesh.dp_group, self.mesh.device)(lengths).tolist()]
        work = [6 * self.hidden_size * count + count * count for count in tokens]
        before = [self.plan.positions_of(rank) for rank in range(self.plan.dp)]
        after = dealt_evenly(work, self.plan.run, self.plan.dp)
        step.record(token_metrics(tokens, before, after))
        step.record(
            {
                "balance/before": imbalance(work, before, self.plan.run),
                "balance/after": imbalance(work, after, self.plan.run),
            }
        )
        return self._moved(batch, after)

    def _moved(self, batch: ExperienceBatch, dealt: Sequence[Sequence[int]]) -> ExperienceBatch:
        owner = {position: dp_rank for dp_rank, positions in enumerate(dealt) for position in positions}
        sends: list[tuple[int, ...]] = [()] * self.mesh.world_size
        receives = [0] * self.mesh.world_size
        own = batch.positions.tolist()
        for dp_rank, peer in enumerate(self.mesh.dp_peers):
            sends[peer] = tuple(row for row, position in enumerate(own) if owner[position] == dp_rank)
            had = self.plan.positions_of(dp_rank)
            receives[peer] = sum(owner[position] == self.mesh.dp_rank for position in had)
        arrived = exchanged(batch, RowExchange(self.mesh.world_group, Routes(tuple(sends), tuple(receives))))
        rows = {position: row for row, position in enumerate(arrived.positions.tolist())}
        return arrived.taken([rows[position] for position in dealt[self.mesh.dp_rank]])


def dealt_evenly(work: Sequence[int], run: int, num_ranks: int) -> list[list[int]]:
    """Positions of each rank: of every `run` consecutive positions as many as the others have, of about the same work
    together."""
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    for start in range(0, len(work), run):
        parts = balanced_parts(work[start : start + run], num_ranks, equal_sizes=True)
        for positions, places in zip(dealt, parts, strict=True):
            positions += [start + place for place in places]
    return dealt


def imbalance(work: Sequence[int], dealt: Sequence[Sequence[int]], run: int) -> float:
    """Mean over runs of the work of the rank with the most, in units of the mean over ranks: 1 is even."""
    ratios = []
    for start in range(0, len(work), run):
        inside = range(start, start + run)
        loads = [sum(work[position] for position in positions if position in inside) for positions in dealt]
        ratios.append(max(loads) * len(loads) / sum(loads))
    return sum(ratios) / len(ratios)


def token_metrics(
    tokens: Sequence[int], before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]
) -> dict[str, float]:
    """`global_seqlen/…`: tokens of the step on the ranks with the fewest and the most, before and after."""
    sums = [sum(tokens[position] for position in positions) for positions in before]
    balanced = [sum(tokens[position] for position in positions) for positions in after]
    return {
        "global_seqlen/min": float(min(sums)),
        "global_seqlen/max": float(max(sums)),
        "global_seqlen/minmax_diff": float(max(sums) - min(sums)),
        "global_seqlen/mean": sum(sums) / len(sums),
        "global_seqlen/balanced_min": float(min(balanced)),
        "global_seqlen/balanced_max": float(max(balanced)),
    }


TRAVELS_AS = {torch.bool: torch.uint8, torch.int16: torch.int32}


def exchanged(batch: ExperienceBatch, exchange: RowExchange) -> ExperienceBatch:
    """The rows that arrive, with all fields that the batch has; bit for bit. A collective call."""
    lengths = batch.lengths
    arrived = exchange.fixed(lengths)
    fields: dict[str, Tensor | None] = {"cu_seqlens": torch.nn.functional.pad(arrived.cumsum(0), (1, 0))}
    for field in dataclasses.fields(batch):
        value: Tensor | None = getattr(batch, field.name)
        if field.name == "cu_seqlens":
            continue
        if value is None or field.name in PER_SEQUENCE:
            fields[field.name] = None if value is None else exchange.fixed(value)
        else:  # bool travels as bytes, and int16, which gloo does not know, as int32
            plain = value.to(TRAVELS_AS.get(value.dtype, value.dtype))
            fields[field.name] = exchange.ragged(plain, lengths, arrived).to(value.dtype)
    return ExperienceBatch(**fields)  # type: ignore[arg-type]
