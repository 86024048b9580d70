"""Losses and their aggregation: values by hand, gradients in closed form and by float64 differences."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megappo.algorithms.aggregate import Denominators, aggregate
from megappo.algorithms.losses import ClipRange, policy_loss, value_loss
from megappo.algorithms.masked import global_moments, one_rank

NAN = math.nan
LOW, HIGH, C = 0.2, 0.3, 3.0


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float32)


# (ratio, advantage, loss, d loss / d log π, clipped, dual clipped) with clips 0.8 and 1.3, dual clip 3.
POLICY = [
    (1.0, 2.0, -2.0, -2.0, False, False),
    (1.0, -2.0, 2.0, 2.0, False, False),
    (1.0, 0.0, 0.0, 0.0, False, False),
    (1.2, 2.0, -2.4, -2.4, False, False),
    (1.5, 2.0, -2.6, 0.0, True, False),  # rewarded, already 30% likelier: stop
    (0.5, 2.0, -1.0, -1.0, False, False),  # rewarded and less likely: pull back, no clip
    (0.5, -2.0, 1.6, 0.0, True, False),  # punished, already 20% less likely: stop
    (0.9, -2.0, 1.8, 1.8, False, False),
    (1.5, -2.0, 3.0, 3.0, False, False),  # punished and likelier: push down, no clip
    (2.9, -2.0, 5.8, 5.8, False, False),
    (4.0, -2.0, 6.0, 0.0, False, True),  # punished, four times likelier: bounded by 3 |A|
    (100.0, -1.0, 3.0, 0.0, False, True),
    (100.0, 1.0, -1.3, 0.0, True, False),
    (0.01, 1.0, -0.01, -0.01, False, False),
]


@pytest.mark.parametrize(("ratio", "advantage", "loss", "gradient", "clipped", "dual"), POLICY)
def test_policy_loss_by_hand(
    ratio: float, advantage: float, loss: float, gradient: float, clipped: bool, dual: bool
) -> None:
    log_probs = row(math.log(ratio) - 1.5).requires_grad_()
    terms = policy_loss(log_probs, row(-1.5), row(advantage), row(1).bool(), ClipRange(LOW, HIGH, C))
    terms.per_token.sum().backward()
    assert terms.per_token.item() == pytest.approx(loss, rel=1e-5)
    assert log_probs.grad is not None
    assert log_probs.grad.item() == pytest.approx(gradient, rel=1e-5)
    assert (terms.clipped.item(), terms.dual_clipped.item()) == (clipped, dual)
    assert terms.ratio.item() == pytest.approx(ratio, rel=1e-5)
    assert terms.kl.item() == pytest.approx(-math.log(ratio), rel=1e-5, abs=1e-7)


def test_an_absurd_ratio_is_finite_and_still() -> None:
    """log ratio 500 is held at 20: ρ = e^20, no overflow, no gradient."""
    log_probs = row(500.0, -500.0).requires_grad_()
    terms = policy_loss(log_probs, row(0, 0), row(-1, -1), row(1, 1).bool(), ClipRange(LOW, HIGH, 1e12))
    terms.per_token.sum().backward()
    assert terms.ratio.tolist() == [pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)]
    assert terms.per_token.tolist() == [pytest.approx([math.exp(20), 0.8], rel=1e-5)]
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[0, 0]]


def test_on_policy_is_exactly_on_policy() -> None:
    log_probs = -torch.rand(3, 50)
    terms = policy_loss(
        log_probs, log_probs.clone(), torch.randn(3, 50), torch.ones(3, 50).bool(), ClipRange(LOW, HIGH, C)
    )
    assert (terms.ratio == 1).all()
    assert (terms.kl == 0).all()
    assert not terms.clipped.any()
    assert not terms.dual_clipped.any()


# (v, v_old, R, loss, gradient, clipped) with ε = 0.5
VALUE = [
    (1.0, 1.0, 3.0, 2.0, -2.0, False),
    (1.4, 1.0, 3.0, 1.28, -1.6, False),  # inside the range
    (2.0, 1.0, 3.0, 1.125, 0.0, True),  # moved 1 towards R: held at 1.5, ½ · 1.5²
    (0.0, 1.0, 3.0, 4.5, -3.0, False),  # moved away: the unclipped error is the larger
    (2.0, 1.0, 1.0, 0.5, 1.0, False),
    (3.0, 3.0, 3.0, 0.0, 0.0, False),
    (5.0, 1.0, 5.0, 6.125, 0.0, True),  # exact, yet too far from v_old: ½ · 3.5²
]


@pytest.mark.parametrize(("value", "old", "target", "loss", "gradient", "clipped"), VALUE)
def test_value_loss_by_hand(
    value: float, old: float, target: float, loss: float, gradient: float, clipped: bool
) -> None:
    values = row(value).requires_grad_()
    terms = value_loss(values, row(old), row(target), row(1).bool(), 0.5)
    terms.per_token.sum().backward()
    assert terms.per_token.item() == pytest.approx(loss, rel=1e-6)
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(gradient, rel=1e-6)
    assert terms.clipped.item() is clipped


def test_policy_gradient_against_float64_differences() -> None:
    """Central differences of an independent float64 formula, away from the kinks of the clips."""
    generator = torch.Generator().manual_seed(3)
    log_probs = torch.randn(4, 25, generator=generator) - 2
    old = log_probs + 0.6 * torch.randn(4, 25, generator=generator)
    advantages = 2 * torch.randn(4, 25, generator=generator)
    mask = torch.rand(4, 25, generator=generator) < 0.7

    def formula(x: Tensor) -> Tensor:
        rho, a = (x - old.double()).exp(), advantages.double()
        loss = torch.stack([-a * rho, -a * rho.clamp(1 - LOW, 1 + HIGH)]).amax(dim=0)
        return torch.where(a < 0, torch.minimum(loss, -a * 2.0), loss)

    step = 1e-6
    numeric = (formula(log_probs.double() + step) - formula(log_probs.double() - step)) / (2 * step)
    x = log_probs.clone().requires_grad_()
    terms = policy_loss(x, old, advantages, mask, ClipRange(LOW, HIGH, 2.0))
    terms.per_token.sum().backward()
    torch.testing.assert_close(terms.per_token.double(), formula(log_probs.double()) * mask, atol=1e-5, rtol=1e-5)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), numeric * mask, atol=1e-5, rtol=1e-5)
    assert terms.clipped.any()
    assert terms.dual_clipped.any()


@pytest.mark.parametrize("poison", [NAN, math.inf, -math.inf])
def test_masked_places_never_leak(poison: float) -> None:
    """Whatever stands in a masked place, loss and gradient are those without it, and 0 there."""
    mask = row(1, 0, 1).bool()
    x, v = row(-1, poison, -2).requires_grad_(), row(1, poison, 2).requires_grad_()
    policy = policy_loss(x, row(-1.1, poison, -2), row(1, poison, -1), mask, ClipRange(LOW, HIGH, C))
    value = value_loss(v, row(1, poison, 1), row(0, poison, 0), mask, 0.5)
    denominators = Denominators.of(mask)
    (aggregate(policy.per_token, mask, "token-mean", denominators)).backward()
    (aggregate(value.per_token, mask, "token-mean", denominators)).backward()
    assert x.grad is not None
    assert v.grad is not None
    assert x.grad[0].tolist() == pytest.approx([-math.exp(0.1) / 2, 0, 0.5], rel=1e-5)
    assert v.grad[0].tolist() == pytest.approx([0.5, 0, 1.0], rel=1e-5)
    for tensor in (policy.per_token, policy.ratio, policy.kl, policy.clipped, value.per_token, value.clipped):
        assert tensor[0, 1] == 0


# Three sequences of 2, 3 and 0 response tokens: losses 1 3 | 2 4 6 | none.
PER_TOKEN = torch.tensor([[NAN, 1.0, 3.0, NAN], [2.0, NAN, 4.0, 6.0], [NAN, NAN, NAN, NAN]])
MASK = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1], [0, 0, 0, 0]]).bool()
MODES = [
    ("token-mean", 16 / 5),
    ("seq-mean-token-sum", (4 + 12) / 2),
    ("seq-mean-token-mean", (2 + 4) / 2),
    ("seq-mean-token-sum-norm", (4 + 12) / 2 / 8),
]


@pytest.mark.parametrize(("mode", "expected"), MODES)
def test_aggregation_by_hand(mode: str, expected: float) -> None:
    denominators = Denominators.of(MASK)
    assert denominators == Denominators(tokens=5, sequences=2)
    result = aggregate(PER_TOKEN, MASK, mode, denominators, scale_length=8)
    assert (result.item(), result.dtype) == (pytest.approx(expected), torch.float32)


# d mean / d loss of tokens (0,1) and (1,0) and of a masked one
MODE_GRADIENTS = [
    ("token-mean", 1 / 5, 1 / 5),
    ("seq-mean-token-sum", 1 / 2, 1 / 2),
    ("seq-mean-token-mean", 1 / 4, 1 / 6),
    ("seq-mean-token-sum-norm", 1 / 16, 1 / 16),
]


@pytest.mark.parametrize(("mode", "first", "second"), MODE_GRADIENTS)
def test_gradient_of_aggregation(mode: str, first: float, second: float) -> None:
    per_token = PER_TOKEN.clone().requires_grad_()
    aggregate(per_token, MASK, mode, Denominators.of(MASK), scale_length=8).backward()
    assert per_token.grad is not None
    torch.testing.assert_close(per_token.grad[0], torch.tensor([0, first, first, 0]))
    torch.testing.assert_close(per_token.grad[1], torch.tensor([second, 0, second, second]))
    assert (per_token.grad[2] == 0).all()


SPLITS: list[list[list[int]]] = [
    [[0], [1], [2], [3], [4], [5]],  # micro-batch 1
    [[0, 1], [2, 3], [4, 5]],  # micro-batch 2
    [[5, 0, 3], [1, 4, 2]],  # two ranks, another order
    [[0, 1, 2, 3, 4], [5], []],  # uneven, with an empty micro-batch
]


@pytest.mark.parametrize(("mode", "split"), itertools.product([mode for mode, _ in MODES], SPLITS))
def test_any_split_gives_the_global_mean(mode: str, split: list[list[int]]) -> None:
    """Shares of micro-batches and ranks, each padded to its own width, add up to the mean and gradient of the whole."""
    generator = torch.Generator().manual_seed(4)
    losses = torch.randn(6, 12, generator=generator).double()
    mask = torch.rand(6, 12, generator=generator) < 0.5
    mask[2] = False
    expected, expected_gradient = float64_mean(losses, mask, mode)

    ranks = [Denominators.of(mask[rows]) for rows in split]
    total = torch.tensor([[part.tokens, part.sequences] for part in ranks]).sum(dim=0).double()
    denominators = ranks[0].reduced(lambda _: total)
    assert denominators == sum(ranks[1:], start=ranks[0]) == Denominators.of(mask)

    x = losses.float().requires_grad_()
    shares = [
        aggregate(torch.nn.functional.pad(x[rows], (0, extra)), torch.nn.functional.pad(mask[rows], (0, extra)), mode,
                  denominators, scale_length=7)
        for extra, rows in enumerate(split)
    ]  # fmt: skip
    torch.stack(shares).sum().backward()
    assert sum(share.item() for share in shares) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), expected_gradient, atol=1e-7, rtol=1e-5)


def float64_mean(losses: Tensor, mask: Tensor, mode: str) -> tuple[float, Tensor]:
    """The definitions on lists of sequences, with no padding anywhere."""
    x = losses.clone().requires_grad_()
    sequences = [x[index][mask[index]] for index in range(len(x)) if mask[index].any()]
    reduce: dict[str, Callable[[list[Tensor]], Tensor]] = {
        "token-mean": lambda parts: torch.cat(parts).mean(),
        "seq-mean-token-sum": lambda parts: torch.stack([part.sum() for part in parts]).mean(),
        "seq-mean-token-mean": lambda parts: torch.stack([part.mean() for part in parts]).mean(),
        "seq-mean-token-sum-norm": lambda parts: torch.stack([part.sum() for part in parts]).mean() / 7,
    }
    mean = reduce[mode](sequences)
    mean.backward()
    assert x.grad is not None
    return mean.item(), x.grad


@pytest.mark.parametrize("mode", [mode for mode, _ in MODES])
def test_an_empty_minibatch_is_zero_with_a_graph(mode: str) -> None:
    per_token = torch.full((2, 3), NAN, requires_grad=True)
    mask = torch.zeros(2, 3, dtype=torch.bool)
    result = aggregate(per_token, mask, mode, Denominators.of(mask), scale_length=8)
    result.backward()
    assert result.item() == 0
    assert per_token.grad is not None
    assert (per_token.grad == 0).all()


def test_the_normalised_mode_needs_its_length() -> None:
    with pytest.raises(AssertionError, match="needs a constant length"):
        aggregate(PER_TOKEN, MASK, "seq-mean-token-sum-norm", Denominators.of(MASK))


def test_unknown_modes_are_refused() -> None:
    with pytest.raises(AssertionError, match="'mean' is no aggregation mode"):
        aggregate(PER_TOKEN, MASK, "mean", Denominators.of(MASK))


def test_moments_by_hand() -> None:
    moments = global_moments(PER_TOKEN, MASK, one_rank)  # 1 3 2 4 6: mean 3.2, squared deviations 14.8
    assert (moments.count, moments.mean, moments.variance) == (5, pytest.approx(3.2), pytest.approx(14.8 / 4))
