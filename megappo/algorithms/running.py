"""Moments of everything seen so far, one batch after another (Welford 1962, in the pairwise form of Chan et al.)."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from megappo.algorithms.masked import SumOverRanks

STD_EPS = 1e-8


class RunningMoments:
    """Count, mean and unbiased variance over all batches of all ranks, in float64."""

    def __init__(self) -> None:
        self.count = 0.0
        self.mean = 0.0
        self._squares = 0.0

    @property
    def std(self) -> float:
        """0 with fewer than two values."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else 0.0

    def update(self, values: Tensor, sum_over_ranks: SumOverRanks) -> None:
        """Adds a batch: `values` [n] of this rank. A collective call where ranks are several."""
        values = values.detach().double()
        count, total = sum_over_ranks(torch.stack([values.new_tensor(float(len(values))), values.sum()])).tolist()
        if count == 0:
            return
        mean = total / count
        squares = float(sum_over_ranks((values - mean).square().sum().reshape(1))[0])
        both, shift = self.count + count, mean - self.mean
        self._squares += squares + shift**2 * self.count * count / both
        self.mean += shift * count / both
        self.count = both

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "mean": self.mean, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.count, self.mean, self._squares = state["count"], state["mean"], state["squares"]
