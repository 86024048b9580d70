"""Means over the responses of one prompt, on one rank and over ranks that share prompts."""

import pytest
import torch
from torch import Tensor

from megappo.algorithms.advantages import ESTIMATORS, AdvantageInputs, AdvantageOptions
from megappo.algorithms.groups import group_moments
from megappo.algorithms.masked import SumOverRanks, one_rank
from tests.unit.test_advantages import run_lockstep

VALUES = torch.tensor([1.0, 2.0, 6.0, 4.0, 4.0, 9.0])
GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])
COUNTS = torch.tensor([True, True, True, True, True, False])
PARTS = ([0, 3, 5], [1, 2, 4])  # each group is on both ranks


def test_moments_by_hand() -> None:
    """1, 2, 6: mean 3, unbiased variance 7; 4, 4 and one that does not count: mean 4, spread exactly 0."""
    found = group_moments(VALUES, COUNTS, GROUPS, 2)
    assert found.count.tolist() == [3, 3, 3, 2, 2, 2]
    assert found.mean.tolist() == [3, 3, 3, 4, 4, 4]
    assert found.std.tolist() == pytest.approx([7**0.5] * 3 + [0] * 3)


def test_a_group_of_one_and_an_empty_one_have_no_spread() -> None:
    found = group_moments(torch.tensor([5.0, 7.0]), torch.tensor([True, False]), torch.tensor([0, 1]), 3)
    assert (found.count.tolist(), found.mean.tolist(), found.std.tolist()) == ([1, 0], [5, 0], [0, 0])


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus_baseline"])
def test_ranks_that_share_prompts_get_the_advantages_of_one_rank(name: str) -> None:
    mask = COUNTS[:, None].expand(-1, 3)
    rewards = torch.zeros(6, 3)
    rewards[:, 2] = VALUES

    def advantages(rows: list[int], total: SumOverRanks) -> Tensor:
        inputs = AdvantageInputs(rewards[rows], mask[rows], GROUPS[rows], 2, sum_over_ranks=total)
        return ESTIMATORS[name](inputs, AdvantageOptions(gamma=0.9)).advantages

    whole = advantages(list(range(6)), one_rank)
    apart = run_lockstep([lambda total, rows=rows: advantages(rows, total) for rows in PARTS])
    for rows, part in zip(PARTS, apart, strict=True):
        torch.testing.assert_close(part, whole[rows], atol=0, rtol=0)
    assert whole[5].tolist() == [0, 0, 0]
