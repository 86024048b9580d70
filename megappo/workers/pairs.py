"""Pairs of sequences in a batch: the chosen response of pair i is sequence 2 i, the rejected one sequence 2 i + 1."""

from __future__ import annotations

import torch
from torch import Tensor

from megappo.algorithms.preferences import PairLoss
from megappo.engines.training import LossTerm
from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import MicroBatch


def sequence_sums(micro: MicroBatch, view: Tensor) -> Tensor:
    """[sequences] float32 sums of a per-token view over each sequence's tokens; what stands in padding is not read.

    `view` is 0 where the response mask is false. Differentiable.
    """
    flat = micro.flat(view).float()
    return summed(micro.rows, flat)


def summed(batch: ExperienceBatch, flat: Tensor) -> Tensor:
    """[sequences] sums of a flat per-token field, with its gradient."""
    owner = torch.repeat_interleave(torch.arange(batch.num_sequences), batch.lengths).to(flat.device)
    return flat.new_zeros(batch.num_sequences).index_add(0, owner, flat)


def chosen_and_rejected(per_sequence: Tensor) -> tuple[Tensor, Tensor]:
    """[2 · pairs] → ([pairs], [pairs])."""
    assert len(per_sequence) % 2 == 0, "the two sequences of a pair stay in one micro-batch"
    return per_sequence[0::2], per_sequence[1::2]


def pair_means(loss: PairLoss, num_pairs: int, *more: Tensor) -> LossTerm:
    """This micro-batch's share of the means over `num_pairs` pairs of the global batch.

    Metrics in order: loss, accuracy, margin, what the chosen and the rejected responses are worth, then `more`
    [pairs] each.
    """
    value = loss.per_pair.sum() / num_pairs
    told = (loss.accuracy, loss.margin, loss.chosen, loss.rejected, *more)
    return LossTerm(value, (value, *(each.detach().double().sum() / num_pairs for each in told)))
