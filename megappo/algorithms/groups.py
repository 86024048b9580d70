"""Mean and spread over the responses to one prompt, which data-parallel ranks may share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.algorithms.masked import SumOverRanks, keep, one_rank


@dataclass(frozen=True)
class GroupMoments:
    """Of each sequence's group, [B] float64: members, mean, unbiased standard deviation (0 for fewer than two)."""

    count: Tensor
    mean: Tensor
    std: Tensor


def group_moments(
    values: Tensor, counts: Tensor, groups: Tensor, num_groups: int, sum_over_ranks: SumOverRanks = one_rank
) -> GroupMoments:
    """Moments of `values` [B] over all sequences of a group, on whatever rank they are.

    `groups` [B] are numbers below `num_groups`, the same on all ranks. Sequences where `counts` [B] is false (responses
    of length zero) are in no mean. Two passes in float64, so that equal values have a deviation of exactly 0.
    """
    values = keep(counts, values.double())

    def totals(per_sequence: Tensor) -> Tensor:
        """[B]: sums over each sequence's group."""
        partial = torch.zeros(num_groups, dtype=torch.float64, device=values.device)
        return sum_over_ranks(partial.index_add(0, groups, keep(counts, per_sequence)))[groups]

    count = totals(torch.ones_like(values))
    mean = totals(values) / count.clamp(min=1)
    squares = totals((values - mean).square())
    return GroupMoments(count, mean, (squares / (count - 1).clamp(min=1)).sqrt())
