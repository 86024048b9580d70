"""Sequences dealt to replicas and delivered to their owners, by hand."""

import torch

from megappo.engines.rollout import Replicas
from megappo.workers.dealing import deal, plan_delivery


def test_the_costliest_prompt_first_each_to_the_least_loaded() -> None:
    """Two samples a prompt, of 5, 9, 6, 4 and 1 tokens: 9·2 | 6·2, then 5·2 → 1 (22), 4·2 → 0 (26), 1·2 → 1 (24)."""
    costs = {2 * prompt + sample: cost for prompt, cost in enumerate((5, 9, 6, 4, 1)) for sample in range(2)}
    assert deal(costs, 2, 2) == [[2, 3, 6, 7], [0, 1, 4, 5, 8, 9]]


def test_equal_costs_go_round_and_some_replicas_get_nothing() -> None:
    assert deal(dict.fromkeys(range(6), 7), 1, 4) == [[0, 4], [1, 5], [2], [3]]
    assert deal(dict.fromkeys(range(4), 7), 2, 3) == [[0, 1], [2, 3], []]


def test_as_many_prompts_as_replicas_leave_none_idle() -> None:
    """What a probe relies on: every replica generates, however long its prompts are."""
    costs = {position: 1000 if position % 3 else 1 for position in range(16)}
    assert all(deal(costs, 1, 16))


def test_delivery_on_tp2_dp2_with_strided_pairs() -> None:
    """Ranks [[0, 1], [2, 3]], replicas (0, 2) and (1, 3); positions 0-2 belong to dp 0, 3-5 to dp 1.

    Replica 0 has 0, 1, 5 and replica 1 has 2, 3, 4. Rank 0 keeps its own two of replica 0; rank 1, which stands outside
    of it, gets them from the first member for dp 0, rank 0. Position 5 goes to ranks 2 (itself) and 3, from the second.
    """
    grid, replicas = torch.arange(4).reshape(1, 2, 2), Replicas(((0, 2), (1, 3)))
    dealt, wanted = [[0, 1, 5], [2, 3, 4]], [[0, 1, 2], [3, 4, 5]]
    plans = [plan_delivery(rank, grid, replicas, dealt, wanted) for rank in range(4)]
    assert [plan.routes.sends for plan in plans] == [
        ((0, 1), (0, 1), (), ()),
        ((0,), (0,), (), ()),
        ((), (), (2,), (2,)),
        ((), (), (1, 2), (1, 2)),
    ]
    assert [plan.routes.receives for plan in plans] == [(2, 1, 0, 0), (2, 1, 0, 0), (0, 0, 1, 2), (0, 0, 1, 2)]
    assert [plan.arrivals for plan in plans] == [(0, 1, 2), (0, 1, 2), (5, 3, 4), (5, 3, 4)]


def test_members_send_alike() -> None:
    """One replica of 4 on half of 8 data-parallel ranks: each member serves one of the 4 outside."""
    grid = torch.arange(8).reshape(1, 8, 1)
    replicas = Replicas(((0, 1, 2, 3), (4, 5, 6, 7)))
    wanted = [[position] for position in range(8)]
    plans = [plan_delivery(rank, grid, replicas, [list(range(8)), []], wanted) for rank in range(4)]
    assert [[receiver for receiver, rows in enumerate(plan.routes.sends) if rows] for plan in plans] == [
        [0, 4], [1, 5], [2, 6], [3, 7],
    ]  # fmt: skip
