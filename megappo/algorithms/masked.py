"""What every algorithm does with a response mask: select without reading masked places, and moments over all ranks."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

SumOverRanks = Callable[[Tensor], Tensor]
"""Sums a small float64 tensor over the data-parallel ranks and returns the sum; every rank must call it alike."""


def one_rank(partial: Tensor) -> Tensor:
    """The SumOverRanks of a single rank."""
    return partial


def keep(mask: Tensor, tensor: Tensor) -> Tensor:
    """`tensor` where `mask` is true and 0 elsewhere, both [B, T].

    Unlike a product with the mask, NaN and infinity in masked places stay there: the result and the gradient are 0. The
    gradient is only safe if inputs are kept *before* they enter non-linear arithmetic (0 · NaN is NaN in backward).
    """
    return torch.where(mask, tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


OverSequence = Callable[[Tensor], Tensor]
"""From one number a token (0 where it does not count) to the sum over its sequence, at each of its tokens."""


def over_rows(view: Tensor) -> Tensor:
    """The OverSequence of [B, T], where a row is a sequence."""
    return view.sum(dim=-1, keepdim=True).expand_as(view)


@dataclass(frozen=True)
class Moments:
    """Mean and unbiased variance of the selected elements of all ranks; NaN where there are too few for them."""

    count: int
    mean: float
    variance: float


def global_moments(tensor: Tensor, mask: Tensor, sum_over_ranks: SumOverRanks) -> Moments:
    """Moments of `tensor` [B, T] where `mask` is true, over all ranks.

    Two passes in float64, so that neither a large mean nor the layout costs digits.
    """
    values = keep(mask, tensor.detach()).double()
    count_and_sum = sum_over_ranks(torch.stack([mask.sum().double(), values.sum()]))
    count, total = int(count_and_sum[0]), float(count_and_sum[1])
    mean = total / count if count else float("nan")
    deviations = keep(mask, values - (mean if count else 0.0))
    squares = float(sum_over_ranks(deviations.square().sum().reshape(1))[0])
    return Moments(count, mean, squares / (count - 1) if count > 1 else float("nan"))
