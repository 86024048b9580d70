"""Samples reach the ranks that train on them, once, in order, to the bit, whichever ranks generate together."""

from itertools import chain
from typing import Any

import pytest

from tests.distributed.programs.exchange import CASES, NUM_SAMPLES
from tests.support.ranks import run_ranks

CALLS = {"16 run": 16, "16 every": 16, "3 every": 3, "4 run": 4}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_ranks("tests.distributed.programs.exchange", nproc=4)


@pytest.mark.parametrize("case", CASES)
def test_every_rank_gets_its_own_samples(case: str, results: dict[str, Any]) -> None:
    grid, ranks = results[case]["grid"], results[case]["ranks"]
    for call, num_prompts in CALLS.items():
        for rank in ranks:
            assert rank[call]["sampled"] == rank[call]["positions"], call
            assert all(rank[call]["is_right"]), call
        one_copy = [[ranks[rank][call]["sampled"] for rank in stage] for stage in zip(*grid[0], strict=True)]
        for positions in one_copy:
            assert sorted(chain.from_iterable(positions)) == list(range(num_prompts * NUM_SAMPLES)), call


@pytest.mark.parametrize("case", CASES)
def test_ranks_receive_their_own_samples_and_nothing_else(case: str, results: dict[str, Any]) -> None:
    for call in CALLS:
        for rank in results[case]["ranks"]:
            expected = 0 if case == "tp2 dp2, own groups" else rank[call]["expected_bytes"]
            assert rank[call]["bytes"] == expected, call


@pytest.mark.parametrize("case", CASES)
def test_replicas_share_the_work(case: str, results: dict[str, Any]) -> None:
    """Each prompt once, its samples on one replica; no replica has more than 4/3 of an even share of many prompts."""
    groups, ranks = results[case]["groups"], results[case]["ranks"]
    for call, num_prompts in CALLS.items():
        asked = [ranks[group[0]][call]["requests"] for group in groups]
        for group, requests in zip(groups, asked, strict=True):
            assert all(ranks[member][call]["requests"] == requests for member in group), call
        everything = sorted(chain.from_iterable(asked))
        assert everything == sorted(list(range(num_prompts)) * NUM_SAMPLES), call
        if case != "tp2 dp2, own groups":
            assert sum(len(set(requests)) for requests in asked) == num_prompts, "a prompt's samples stay together"
        if num_prompts == 16:
            tokens = [ranks[group[0]][call]["tokens"] for group in groups]
            assert max(tokens) <= 4 / 3 * sum(tokens) / len(groups), call


@pytest.mark.parametrize("case", CASES)
def test_error_of_one_replica_is_raised_on_every_rank(case: str, results: dict[str, Any]) -> None:
    assert [rank["error"] for rank in results[case]["ranks"]] == ["DataError: prompt 7 is too long"] * 4


def test_progress_counts_over_all(results: dict[str, Any]) -> None:
    for case in CASES:
        if case != "tp2 dp2, own groups":
            for rank in results[case]["ranks"]:
                assert rank["16 run"]["progress"] == [[48, 48]], case


def test_metrics_of_a_switch_sum_what_moved_and_take_the_most_of_what_is_held(results: dict[str, Any]) -> None:
    """Four ranks with 1, 2, 3 and 4 times the number: 10 times it in all, 4 times it at most."""
    assert results["switch metrics"] == {
        "hybrid/bytes_aliased": 10,
        "hybrid/bytes_copied": 100,
        "hybrid/bytes_sent": 1000,
        "hybrid/bytes_received": 10_000,
        "hybrid/seconds": 0.5,
        "hybrid/turn_seconds": 1.25,
        "hybrid/peak_bytes": 40_000,
        "hybrid/extra_bytes": 60_000,
        "hybrid/held_asleep_bytes": 400_000,
        "hybrid/held_weights_bytes": 4_000_000,
        "hybrid/held_awake_bytes": 40_000_000,
    }
