"""Packed micro-batches, and those cut by tokens, against padded ones on one rank: numbers, gradients, boundaries."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.programs.packing import LENGTHS, LIMIT, PERTURBED, minibatch
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_model

LIMIT_OF_DIFFERENCE = 1e-5
WAYS = [("one", "packed"), ("one", "dynamic"), ("tp2-sp", "padded"), ("tp2-sp", "packed"), ("tp2-sp", "dynamic")]
Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each rank of each layout found, by layout."""
    folder = tmp_path_factory.mktemp("packing")
    tiny_model(folder / "actor", "qwen3", tied=True)
    tiny_model(folder / "critic", "qwen3", tied=True, value_head=True, seed=1)
    for nproc in (1, 2):
        run_ranks("tests.distributed.programs.packing", "--models", folder, "--ranks", nproc, nproc=nproc)
    files = {"one": 1, "dp2": 2, "tp2-sp": 2}
    return {name: [torch.load(folder / f"{name}-{rank}.pt") for rank in range(count)] for name, count in files.items()}


@pytest.mark.parametrize(("layout", "way"), WAYS)
def test_log_probs_values_and_losses_are_those_of_padded_sequences(results: Results, layout: str, way: str) -> None:
    ours, expected = results[layout][0][way], results["one"][0]["padded"]
    for name in ("log_probs", "values", "scores"):
        difference = float((ours[name] - expected[name]).abs().max())
        print(f"{layout:<8}{way:<9}{name:<10}{difference:.1e}")
        assert difference <= LIMIT_OF_DIFFERENCE and float(expected[name].abs().max()) > 0.1
    for name in ("vanilla", "gspo", "critic"):
        assert_same_metrics(ours[name][1], expected[name][1])


@pytest.mark.parametrize("way", ["packed", "dynamic"])
def test_gradients_are_those_of_padded_sequences(results: Results, way: str) -> None:
    assert_same_gradients(results["one"][0][way], results["one"][0]["padded"])


def test_uneven_ranks_make_as_many_micro_batches_and_the_one_rank_update(results: Results) -> None:
    """188 tokens in 5 sequences on one rank, 37 in 3 on the other, whose last two micro-batches are empty."""
    first, second = (rank["dynamic"] for rank in results["dp2"])
    assert first["tokens"] == second["tokens"]
    assert [sorted(rank) for rank in first["tokens"]] == [[31, 38, 39, 40, 40], [1, 1, 1, 2, 34]]
    expected = results["one"][0]["padded"]
    assert_same_gradients(first, expected)
    for name in ("vanilla", "gspo", "critic"):
        assert_same_metrics(first[name][1], expected[name][1])
    for name in ("log_probs", "values", "scores"):
        both = torch.cat([first[name], second[name]])
        assert float((both - expected[name]).abs().max()) <= LIMIT_OF_DIFFERENCE


@pytest.mark.parametrize(("layout", "way"), [way for way in WAYS if way[1] != "padded"])
def test_another_sequence_moves_no_bit(results: Results, layout: str, way: str) -> None:
    found, batch = results[layout][0][way], minibatch()
    own = torch.zeros(batch.num_tokens, dtype=torch.bool)
    own[batch.token_places([PERTURBED])] = True
    assert torch.equal(found["log_probs"][~own], found["perturbed"][~own])
    own &= batch.response_mask
    assert float((found["log_probs"] - found["perturbed"])[own].abs().min()) > 1e-3


def test_micro_batches_hold_at_most_the_limit(results: Results) -> None:
    """225 tokens in micro-batches of 40: 6 at least, and no six can hold them."""
    (tokens,) = results["one"][0]["dynamic"]["tokens"]
    assert sum(tokens) == sum(LENGTHS) and max(tokens) <= LIMIT and len(tokens) == 6


def assert_same_metrics(ours: dict[str, float], expected: dict[str, float]) -> None:
    for name, value in expected.items():
        if not name.endswith("micro_batches"):
            assert ours[name] == pytest.approx(value, rel=LIMIT_OF_DIFFERENCE, abs=LIMIT_OF_DIFFERENCE), name


def assert_same_gradients(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    for kind in ("vanilla", "gspo", "critic"):
        gradients: dict[str, Tensor] = expected[kind][0]
        assert ours[kind][0].keys() == gradients.keys() and gradients
        worst = max(
            (float((ours[kind][0][name] - value).norm() / value.norm()), name) for name, value in gradients.items()
        )
        print(f"{kind:<9}{worst[0]:.1e} {worst[1]}")
        assert worst[0] <= LIMIT_OF_DIFFERENCE, (kind, worst)
