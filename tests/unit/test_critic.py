"""The critic's metrics from hand arithmetic."""

import pytest
import torch

from megappo.algorithms.aggregate import Denominators
from megappo.config.actor import CriticConfig
from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import micro_batches
from megappo.workers.critic import CriticLoss, _explained_variance


def explained(returns: list[float], values: list[float], micro_batch_size: int) -> float:
    """Of sequences with a prompt token and one response token each; the value head's output is one row earlier."""
    count = len(returns)
    batch = ExperienceBatch.from_sequences([[3, 4]] * count, [1] * count, range(count))
    fields = {name: torch.zeros(2 * count) for name in ("returns", "values")}
    fields["returns"][1::2] = torch.tensor(returns)
    batch = batch.fill(**fields)
    loss = CriticLoss(CriticConfig(), Denominators(tokens=count, sequences=count), scale_length=1)
    totals = torch.zeros(len(loss.metrics), dtype=torch.float64)
    for number, micro in enumerate(micro_batches(batch, micro_batch_size)):
        output = torch.zeros(micro.num_sequences, 2, 1)
        output[:, 0, 0] = torch.tensor(values[number * micro_batch_size :][: micro.num_sequences])
        totals += torch.stack([value.detach().double() for value in loss(output, micro).metrics])
    return _explained_variance(dict(zip(loss.metrics, totals.tolist(), strict=True)))


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_explained_variance_of_large_returns(micro_batch_size: int) -> None:
    """Returns vary by ¼ around 1000.5, errors by 1/16: 1 − ¼."""
    returns, values = [1000.0, 1001.0, 1000.0, 1001.0], [1000.25, 1000.75, 1000.25, 1000.75]
    assert explained(returns, values, micro_batch_size) == pytest.approx(0.75, abs=1e-6)


def test_explained_variance_of_small_returns() -> None:
    returns, values = [0.0, 1e-4, 0.0, 1e-4], [0.25e-4, 0.75e-4, 0.25e-4, 0.75e-4]
    assert explained(returns, values, 2) == pytest.approx(0.75, abs=1e-6)


def test_explained_variance_of_equal_returns_is_0() -> None:
    """Also where float32's rounding makes them differ in the last place."""
    assert explained([0.7] * 7, [0.1 * place for place in range(7)], 3) == 0.0
    nearly = [1.0, 1.0 + torch.finfo(torch.float32).eps] * 3
    assert explained(nearly, [0.1 * place for place in range(6)], 2) == 0.0
