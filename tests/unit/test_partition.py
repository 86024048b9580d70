"""Numbers in parts of about the same sum, by hand and by what must hold for any; sequences dealt over ranks."""

import itertools
import random

import pytest

from megappo.experience.partition import balanced_parts, parts_within
from megappo.trainer.balance import dealt_evenly, imbalance, token_metrics


def test_two_parts_by_the_differencing_method() -> None:
    """8 7 6 5 4: 8 - 7 = 1, 6 - 5 = 1, 4 - 1 = 3, 3 - 1 = 2: {8, 6} and {7, 5, 4}; the best would differ by 0."""
    assert balanced_parts([8, 7, 6, 5, 4], 2) == [[0, 2], [1, 3, 4]]


def test_parts_of_one_size() -> None:
    """Pairs 9 1, 8 2, 7 3, dealt so that two ranks get three numbers each."""
    assert sorted(map(len, balanced_parts([9, 1, 8, 2, 7, 3], 2, equal_sizes=True))) == [3, 3]
    assert balanced_parts([100, 1, 1, 1], 2) == [[0], [1, 2, 3]]
    assert sorted(map(len, balanced_parts([100, 1, 1, 1], 2, equal_sizes=True))) == [2, 2]
    with pytest.raises(AssertionError, match="3 costs can't make 2 parts of one size"):
        balanced_parts([1, 2, 3], 2, equal_sizes=True)


def test_more_parts_than_numbers_leave_the_last_ones_empty() -> None:
    assert balanced_parts([3, 5], 4) == [[0], [1], [], []]
    assert balanced_parts([], 2) == [[], []]


def test_every_number_is_in_one_part_and_sums_are_close() -> None:
    draw = random.Random(0)
    for count, num_parts, equal in itertools.product((8, 24, 64), (2, 4, 8), (False, True)):
        costs = [draw.randint(1, 1000) for _ in range(count)]
        parts = balanced_parts(costs, num_parts, equal_sizes=equal)
        assert sorted(itertools.chain(*parts)) == list(range(count)) and len(parts) == num_parts
        assert not equal or {len(part) for part in parts} == {count // num_parts}
        sums = [sum(costs[place] for place in part) for part in parts]
        assert max(sums) - min(sums) <= max(costs)
        if count == 64:
            assert max(sums) <= 1.05 * sum(costs) / num_parts


def test_fewest_parts_within_a_limit() -> None:
    assert parts_within([6, 6, 6], 10) == [[0], [1], [2]]  # 18 tokens in 2 · 10, but no two of them fit together
    assert [sum([5, 5, 4, 6][place] for place in part) for part in parts_within([5, 5, 4, 6], 10)] == [10, 10]
    with pytest.raises(AssertionError, match="a cost of 11 is over the limit of 10 on its own"):
        parts_within([3, 11], 10)


def test_dealing_stays_within_runs() -> None:
    """Two runs of four sequences on two ranks: each rank keeps two of each, and the work of each run is even.

    10 + 1 and 9 + 2; of equal ones the first of the one pair goes with the last of the other.
    """
    work = [10, 9, 1, 2, 5, 5, 5, 5]
    before = [[0, 1, 4, 5], [2, 3, 6, 7]]
    after = dealt_evenly(work, 4, 2)
    assert after == [[0, 2, 4, 7], [1, 3, 5, 6]]
    assert imbalance(work, before, 4) == pytest.approx((19 / 11 + 1) / 2)
    assert imbalance(work, after, 4) == 1.0
    assert token_metrics(work, before, after) == {
        "global_seqlen/min": 13.0, "global_seqlen/max": 29.0, "global_seqlen/minmax_diff": 16.0,
        "global_seqlen/mean": 21.0, "global_seqlen/balanced_min": 21.0, "global_seqlen/balanced_max": 21.0,
    }  # fmt: skip
