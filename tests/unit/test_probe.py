"""Log-probs of engine and trainer side by side, on one rank, by hand."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.errors import ExitCode, WeightSwitchError
from megappo.experience.sample import Prompt, RolloutSample
from megappo.launcher.failure import Failure
from megappo.trainer.probe import compare


def alone() -> Any:
    """The mesh of a world of one rank, as far as reductions ask."""
    return SimpleNamespace(world_group=SimpleNamespace(size=lambda: 1), device=torch.device("cpu"))


def sample(index: int, log_probs: tuple[float, ...]) -> RolloutSample:
    tokens = tuple(range(10 * index, 10 * index + len(log_probs)))
    return RolloutSample(Prompt(index, "made", (1,), ""), index, 0, tokens, log_probs, "", "stop")


def test_mean_maximum_and_the_worst_token() -> None:
    samples = [sample(3, (-1.0, -2.0)), sample(7, (-0.5, -0.25, -4.0))]
    found = compare(samples, torch.tensor([-1.0, -2.5, -0.5, -1.25, -4.0]), alone())
    assert (found.mean, found.max) == (0.3, 1.0)
    assert str(found.worst) == ("prompt 7 of made, response token 1 (id 71): -0.25 in the engine, -1.25 in the trainer")


@pytest.mark.parametrize("broken", [float("nan"), float("-inf")])
def test_a_log_prob_that_is_no_number_is_above_every_limit(broken: float) -> None:
    found = compare([sample(3, (-1.0, -2.0))], torch.tensor([-1.0, broken]), alone())
    assert found.mean == found.max == float("inf") and found.worst.place == 1
    found = compare([sample(3, (-1.0, broken))], torch.tensor([-1.0, -2.0]), alone())
    assert found.mean == float("inf")


def test_the_error_ends_a_run_with_exit_code_1() -> None:
    assert Failure.of(WeightSwitchError("step 1: …"), rank=0).exit_code == ExitCode.FAILED
