"""Dynamic sampling sends each sample to the rank that trains on it and no other; what arrives is what was chosen."""

from typing import Any

import pytest

from tests.distributed.programs.dynamic_sampling import CHOSEN, LAYOUTS, N
from tests.support.ranks import run_ranks

NAMES = [name for layouts in LAYOUTS.values() for name in layouts]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for nproc in LAYOUTS:
        found |= run_ranks("tests.distributed.programs.dynamic_sampling", nproc=nproc)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_ranks_get_their_share_of_what_was_chosen(results: dict[str, Any], name: str) -> None:
    assert all(rank["is_right"] for rank in results[name])
    shares = {tuple(rank["positions"]) for rank in results[name]}
    assert sorted(position for share in shares for position in share) == list(range(len(CHOSEN) * N))


@pytest.mark.parametrize("name", NAMES)
def test_no_sample_goes_where_it_is_not_trained_on(results: dict[str, Any], name: str) -> None:
    assert [rank["gathered"] for rank in results[name]] == [0] * len(results[name])
    for rank in results[name]:
        if name == "tp2 pp2":  # one copy of the model: nothing is sent
            assert rank["received"] == 0
        else:
            assert rank["own"] <= rank["received"] <= 1.1 * rank["own"]
