"""Decoding over pipeline stages in groups of sequences: the tokens of one rank for any number of groups, on every
layout, and stages that work at the same time."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.programs.pipelined_decoding import NUM_TOKENS, TRIALS
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_model

PROGRAM = "tests.distributed.programs.pipelined_decoding"
LIMIT = 1e-6
"""Of log-probs, in nats: other groups multiply matrices of other sizes."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    tiny_model(folder / "dense", "llama", seed=5, num_layers=4)
    tiny_model(folder / "experts", "qwen3_moe", seed=6, num_layers=4)
    return folder


@pytest.fixture(scope="module")
def one(two_ranks: dict[str, Any]) -> dict[str, Any]:
    """What one rank says, by trial."""
    found = two_ranks["one"]["1"]
    assert len({len(response[0]) for response in found["few slots"]}) > 3, "responses end at different steps"
    return found  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def two_ranks(models: Path) -> dict[str, Any]:
    return run_ranks(PROGRAM, models, "--cases", "one", "pp2", nproc=2)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def virtual(models: Path) -> dict[str, Any]:
    return run_ranks(PROGRAM, models, "--cases", "pp2 vpp2", nproc=2)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def four_ranks(models: Path) -> dict[str, Any]:
    return run_ranks(PROGRAM, models, "--cases", "tp2 pp2 sp", "pp4", nproc=4)  # type: ignore[no-any-return]


def assert_equal(got: dict[str, Any], one: dict[str, Any]) -> None:
    assert got["ranks_agree"]
    for trial in (*TRIALS, "experts"):
        for ours, theirs in zip(got[trial], one[trial], strict=True):
            assert (ours[0], ours[2], ours[3]) == (theirs[0], theirs[2], theirs[3]), trial
            assert ours[1] == pytest.approx(theirs[1], abs=LIMIT), trial


def test_any_number_of_groups_gives_the_tokens_of_one_rank(one: dict[str, Any], two_ranks: dict[str, Any]) -> None:
    """Also where groups end in their first step, there are more of them than sequences, or they are of unequal size."""
    for got in two_ranks["pp2"].values():
        assert_equal(got, one)


@pytest.mark.slow
def test_so_does_it_over_virtual_stages(one: dict[str, Any], virtual: dict[str, Any]) -> None:
    for got in virtual["pp2 vpp2"].values():
        assert_equal(got, one)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tp2 pp2 sp", "pp4"])
def test_so_does_it_on_four_ranks(layout: str, one: dict[str, Any], four_ranks: dict[str, Any]) -> None:
    for got in four_ranks[layout].values():
        assert_equal(got, one)


def intervals(events: list[Any]) -> list[tuple[int, float, float]]:
    """(lane, begin, end) of each forward of a rank."""
    begun = [(lane, when) for what, lane, when in events if what == "begins"]
    ended = [when for what, _, when in events if what == "ends"]
    return [(lane, begin, end) for (lane, begin), end in zip(begun, ended, strict=True)]


def test_a_stage_begins_the_next_group_before_the_tokens_of_the_one_before_are_back(two_ranks: dict[str, Any]) -> None:
    first, second = two_ranks["overlap"]["2"]
    order = [(what, lane) for what, lane, _ in first if what != "ends"]
    step = [("begins", 0), ("begins", 1), ("has tokens", 0), ("begins", 0), ("has tokens", 1), ("begins", 1)]
    assert order[:6] == step
    # At the same time: in every round, stage 1 computes the first group while stage 0 computes the second.
    ours = [times for lane, *times in intervals(first) if lane == 1]
    theirs = [times for lane, *times in intervals(second) if lane == 0]
    assert len(ours) == len(theirs) == NUM_TOKENS
    for (begin, end), (their_begin, their_end) in zip(ours, theirs, strict=True):
        assert min(end, their_end) - max(begin, their_begin) > 0


def test_one_group_leaves_the_other_stage_idle(two_ranks: dict[str, Any]) -> None:
    """What the groups are for: no two forwards at once, and a step takes all stages one after the other."""
    first, second = two_ranks["overlap"]["1"]
    times = sorted(times for events in (first, second) for _, *times in intervals(events))
    assert len(times) == 2 * NUM_TOKENS
    assert all(before[1] <= after[0] for before, after in pairwise(times))
