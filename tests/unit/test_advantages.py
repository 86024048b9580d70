"""Token rewards, GAE and whitening: hand arithmetic, and a float64 reference that follows the definition."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megappo.algorithms.advantages import gae, is_last_response_token, token_rewards, whiten
from megappo.algorithms.kl import kl_estimate

NAN = math.nan


def reference_gae(
    rewards: list[float], values: list[float], mask: list[int], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """A_i = Σ_k (γλ)^k δ_{i+k} over the response tokens in order, written as the sum and not as the recursion."""
    places = [t for t, kept in enumerate(mask) if kept]
    r, v = [rewards[t] for t in places], [values[t] for t in places]
    deltas = [r[i] + gamma * (v[i + 1] if i + 1 < len(v) else 0.0) - v[i] for i in range(len(places))]
    advantages, returns = [0.0] * len(mask), [0.0] * len(mask)
    for i, place in enumerate(places):
        advantages[place] = sum((gamma * lam) ** k * deltas[i + k] for k in range(len(places) - i))
        returns[place] = advantages[place] + v[i]
    return advantages, returns


# (rewards, values, mask, gamma, lam, advantages, returns), by hand.
BY_HAND = [
    # Monte Carlo: γ = λ = 1 gives reward to come less value.
    ([0, 0, 1], [0.5, 0.25, 0.75], [1, 1, 1], 1.0, 1.0, [0.5, 0.75, 0.25], [1, 1, 1]),
    # One-step TD: λ = 0 leaves δ.
    ([0, 0, 1], [0.5, 0.25, 0.75], [1, 1, 1], 1.0, 0.0, [-0.25, 0.5, 0.25], [0.25, 0.75, 1]),
    # γ = λ = 0.5: δ = (-0.375, 0.125, 0.25); A2 = 0.25, A1 = 0.125 + 0.0625, A0 = -0.375 + 0.25 · 0.1875.
    ([0, 0, 1], [0.5, 0.25, 0.75], [1, 1, 1], 0.5, 0.5, [-0.328125, 0.1875, 0.25], [0.171875, 0.4375, 1]),
    # γ = 0: the reward of the token alone.
    ([1, 2, 3], [0.5, 0.5, 0.5], [1, 1, 1], 0.0, 1.0, [0.5, 1.5, 2.5], [1, 2, 3]),
    # A gap neither discounts nor bootstraps: the same numbers as without it.
    (
        [0, 9, 0, 1],
        [0.5, 9, 0.25, 0.75],
        [1, 0, 1, 1],
        0.5,
        0.5,
        [-0.328125, 0, 0.1875, 0.25],
        [0.171875, 0, 0.4375, 1],
    ),
    # Prompt before, padding after.
    ([9, 0, 1, 9], [9, 0.5, 0.25, 9], [0, 1, 1, 0], 1.0, 1.0, [0, 0.5, 0.75, 0], [0, 1, 1, 0]),
    # NaN wherever it is masked.
    ([NAN, 0, NAN, 1], [NAN, 0.5, NAN, 0.25], [0, 1, 0, 1], 1.0, 1.0, [0, 0.5, 0, 0.75], [0, 1, 0, 1]),
    # No response at all.
    ([1, 1], [1, 1], [0, 0], 0.9, 0.9, [0, 0], [0, 0]),
    # One token.
    ([2], [0.5], [1], 0.9, 0.9, [1.5], [2]),
    # Dense rewards, γ = 0.5, λ = 1: returns are 1 + 0.5 · (1 + 0.5 · 1).
    ([1, 1, 1], [0, 0, 0], [1, 1, 1], 0.5, 1.0, [1.75, 1.5, 1], [1.75, 1.5, 1]),
]


@pytest.mark.parametrize(("rewards", "values", "mask", "gamma", "lam", "advantages", "returns"), BY_HAND)
def test_gae_by_hand(
    rewards: list[float],
    values: list[float],
    mask: list[int],
    gamma: float,
    lam: float,
    advantages: list[float],
    returns: list[float],
) -> None:
    found = gae(
        torch.tensor([rewards]).float(), torch.tensor([values]).float(), torch.tensor([mask]).bool(), gamma, lam
    )
    assert found[0].tolist() == [pytest.approx(advantages, abs=1e-7)]
    assert found[1].tolist() == [pytest.approx(returns, abs=1e-7)]


@pytest.mark.parametrize("gamma", [1.0, 0.99])
@pytest.mark.parametrize("lam", [1.0, 0.95, 0.5])
def test_gae_of_a_ragged_batch_with_gaps(gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(1)
    rewards = torch.randn(5, 37, generator=generator)
    values = torch.randn(5, 37, generator=generator)
    mask = torch.rand(5, 37, generator=generator) < 0.6
    mask[3] = False
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    assert advantages.dtype == returns.dtype == torch.float32
    for row in range(5):
        expected = reference_gae(rewards[row].tolist(), values[row].tolist(), mask[row].int().tolist(), gamma, lam)
        assert advantages[row].tolist() == pytest.approx(expected[0], abs=2e-6)
        assert returns[row].tolist() == pytest.approx(expected[1], abs=2e-6)


def test_returns_of_a_long_undiscounted_response_are_exact() -> None:
    """30,000 tokens with reward 0.1 each: float32 accumulation would be off by whole units."""
    length = 30_000
    rewards = torch.full((1, length), 0.1)
    _, returns = gae(rewards, torch.zeros(1, length), torch.ones(1, length, dtype=torch.bool), 1.0, 1.0)
    assert returns[0, 0].item() == pytest.approx(length * float(torch.tensor(0.1)), rel=1e-7)


# (mask, places of the score of 3.0)
LAST_TOKENS = [
    ([0, 1, 1, 0], [0, 0, 3, 0]),
    ([0, 1, 0, 1], [0, 0, 0, 3]),
    ([1, 0, 0, 0], [3, 0, 0, 0]),
    ([0, 0, 0, 0], [0, 0, 0, 0]),
    ([1, 1, 1, 1], [0, 0, 0, 3]),
]


@pytest.mark.parametrize(("mask", "expected"), LAST_TOKENS)
def test_the_score_lands_on_the_last_response_token(mask: list[int], expected: list[float]) -> None:
    rewards = token_rewards(torch.tensor([3.0]), torch.tensor([mask]).bool(), None, 0.1)
    assert rewards.tolist() == [expected]
    assert is_last_response_token(torch.tensor([mask]).bool()).tolist() == [[place != 0 for place in expected]]


# (estimator, KL of (x, r) = (-1, -3) by hand)
PENALTIES = [("kl", 2.0), ("abs", 2.0), ("mse", 2.0), ("k3", 1.1353352832), ("kl+", 2.0), ("k3+", 1.1353352832)]


@pytest.mark.parametrize(("kl_penalty", "kl"), PENALTIES)
def test_the_kl_penalty_is_on_every_response_token(kl_penalty: str, kl: float) -> None:
    mask = torch.tensor([[False, True, True], [False, False, False]])
    old = torch.tensor([[NAN, -1.0, -1.0], [NAN, NAN, NAN]])
    reference = torch.tensor([[NAN, -3.0, -3.0], [NAN, NAN, NAN]])
    estimate = kl_estimate(kl_penalty, old, reference)
    rewards = token_rewards(torch.tensor([1.0, 5.0]), mask, estimate, beta=0.25)
    assert rewards.dtype == torch.float32
    assert rewards[0].tolist() == pytest.approx([0, -0.25 * kl, 1 - 0.25 * kl], rel=1e-6)
    assert rewards[1].tolist() == [0, 0, 0]


def test_whitening_by_hand() -> None:
    """1, 2, 3, 6: mean 3, unbiased variance 14/3; the masked 99 and NaN change nothing."""
    advantages = torch.tensor([[1.0, 99.0, 2.0], [3.0, 6.0, NAN]])
    mask = torch.tensor([[True, False, True], [True, True, False]])
    scale = 1 / math.sqrt(14 / 3 + 1e-8)
    result = whiten(advantages, mask)
    assert result[0].tolist() == pytest.approx([-2 * scale, 0, -1 * scale], rel=1e-6)
    assert result[1].tolist() == pytest.approx([0, 3 * scale, 0], rel=1e-6)


def test_whitening_survives_a_large_mean() -> None:
    """Values 1e4 ± 1e-2·k in float32: the one-pass variance E[x²] - E[x]² has no digit left there."""
    advantages = 1e4 + torch.arange(8).reshape(1, 8) / 64  # exact in float32
    mask = torch.ones(1, 8, dtype=torch.bool)
    result = whiten(advantages, mask)
    exact = (torch.arange(8).double() - 3.5) / math.sqrt(6.0)  # variance of 0…7 is 6
    torch.testing.assert_close(result[0].double(), exact, atol=1e-5, rtol=0)


def test_equal_advantages_whiten_to_zero() -> None:
    result = whiten(torch.full((1, 4), 7.0), torch.ones(1, 4, dtype=torch.bool))
    assert result.tolist() == [[0, 0, 0, 0]]


def test_whitening_is_over_all_ranks() -> None:
    """Two ranks with different numbers of tokens get what one rank gets from all of them."""
    generator = torch.Generator().manual_seed(2)
    advantages = torch.randn(6, 9, generator=generator) * 3 + 5
    mask = torch.rand(6, 9, generator=generator) < 0.5
    together = whiten(advantages, mask)
    parts = [slice(0, 2), slice(2, 6)]
    assert mask[parts[0]].sum() != mask[parts[1]].sum()
    apart = run_lockstep([lambda total, part=part: whiten(advantages[part], mask[part], total) for part in parts])
    torch.testing.assert_close(torch.cat(apart), together, atol=1e-6, rtol=0)


def run_lockstep(ranks: list[Callable[[Callable[[Tensor], Tensor]], Tensor]]) -> list[Tensor]:
    """Runs each rank's function so often that every reduction has all ranks' contributions."""
    contributions: list[list[Tensor]] = [[] for _ in ranks]
    known: list[Tensor] = []
    results: list[Tensor] = []
    while len(results) < len(ranks):
        results = []
        for rank, function in enumerate(ranks):
            contributions[rank] = []

            def total(partial: Tensor, rank: int = rank) -> Tensor:
                contributions[rank].append(partial)
                call = len(contributions[rank]) - 1
                if call >= len(known):
                    raise LookupError
                return known[call]

            try:
                results.append(function(total))
            except LookupError:
                continue
        if len(results) < len(ranks):
            known.append(torch.stack([calls[len(known)] for calls in contributions]).sum(dim=0))
    return results


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_too_few_tokens_stay_unwhitened(num_tokens: int) -> None:
    mask = torch.zeros(1, 3, dtype=torch.bool)
    mask[0, :num_tokens] = True
    with pytest.warns(RuntimeWarning, match=f"the step has {num_tokens} response token"):
        result = whiten(torch.tensor([[5.0, NAN, 3.0]]), mask)
    assert result.tolist() == [[5.0 if num_tokens else 0, 0, 0]]
