"""The table of values: every estimator, loss, aggregation and correction against hand or float64 arithmetic."""

import math

import pytest
import torch
from torch import Tensor

from megappo.algorithms.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    AdvantageOptions,
    gae,
    standardized,
    token_rewards,
    whiten,
)
from megappo.algorithms.aggregate import Denominators, aggregate
from megappo.algorithms.correction import CorrectionLimits, correction_weights
from megappo.algorithms.kl import KLController, kl_estimate
from megappo.algorithms.losses import POLICY_LOSSES, ClipRange, value_loss
from megappo.algorithms.masked import global_moments
from megappo.config.actor import ActorConfig
from tests.support.values import Row, print_table, with_gradient

NAN = math.nan
E2 = math.exp(2.0)


def row(*numbers: float) -> Tensor:
    return torch.tensor([numbers], dtype=torch.float32)


def mask(*rows: str) -> Tensor:
    """'011' → [False, True, True]."""
    return torch.tensor([[letter == "1" for letter in text] for text in rows])


def kl(name: str, x: float, r: float, value: float, gradient: float) -> Row:
    """Value and d / dx of one estimator at log π = x, log π_ref = r."""
    return Row(
        f"{name} at x {x:g}, r {r:g}: value, d/dx",
        lambda: with_gradient(lambda at: kl_estimate(name, at, row(r)), [x]),
        [value, gradient],
    )


KL = [
    kl("kl", -1, -3, 2, 1),
    kl("k1", -3, -1, -2, 1),
    kl("abs", -1, -3, 2, 1),
    kl("abs", -3, -1, 2, -1),
    kl("mse", -1, -3, 2, 2),
    kl("k2", -3, -1, 2, -2),
    kl("k3", -1, -3, 1.1353352832, 0.8646647168),  # d = −2: e^−2 + 2 − 1, 1 − e^−2
    kl("low_var_kl", -3, -1, E2 - 3, 1 - E2),
    kl("k3", 0, -30, 10, 0),
    kl("k3", -30, 0, 10, 0),
    kl("k3", 0, -10.5, math.exp(-10.5) + 9.5, 1 - math.exp(-10.5)),
    kl("k1+", -1, -3, 2, 2),
    kl("kl+", -3, -1, -2, -2),
    kl("abs+", -3, -1, 2, -2),
    kl("mse+", -1, -3, 2, 2),
    kl("k2+", -1, -3, 2, 2),
    kl("k3+", -1, -3, 1.1353352832, 2),
    kl("low_var_kl+", 0, -30, 10, 30),
    Row("k3 with NaN where masked: value, gradient", lambda: _masked_kl(), [1.1353352832, 0, 0.8646647168, 0]),
]


def _masked_kl() -> Tensor:
    reference, kept = row(-3, NAN), mask("10")
    return with_gradient(lambda x: kl_estimate("k3", x, reference, kept), [-1, NAN])


def controller(current: float, sequences: int, expected: float) -> Row:
    def moved() -> Tensor:
        control = KLController("adaptive", kl_coef=0.1, target_kl=0.01, horizon=1000)
        control.update(current, sequences)
        return torch.tensor(control.coefficient, dtype=torch.float64)

    return Row(f"β 0.1 at KL {current:g} (target 0.01), {sequences} sequences", moved, expected, 1e-12)


CONTROLLER = [
    controller(0.01, 256, 0.1),
    controller(0.011, 500, 0.105),
    controller(1.0, 256, 0.1 * (1 + 0.2 * 0.256)),
    controller(0.0, 256, 0.1 * (1 - 0.2 * 0.256)),
    controller(-5.0, 10**6, 0.08),  # never negative, however large the step
]

# δ by hand, γ = λ = ½: (−0.375, 0.125, 0.25); A₂ = 0.25, A₁ = 0.125 + ¼ · 0.25, A₀ = −0.375 + ¼ · 0.1875.
HALF = [-0.328125, 0.1875, 0.25]


def gae_row(
    name: str, rewards: Tensor, values: Tensor, kept: Tensor, gamma: float, lam: float, expected: list[float]
) -> Row:
    """Advantages, then returns."""
    return Row(f"GAE {name}", lambda: torch.cat(gae(rewards, values, kept, gamma, lam)), expected)


def estimator(
    name: str,
    scores: list[float],
    kept: Tensor,
    expected: list[float],
    *,
    what: str = "",
    values: Tensor | None = None,
    baseline: list[float] | None = None,
    n: int = 2,
    **options: float | bool,
) -> Row:
    """Advantages (then returns) of scores, n responses a prompt, without whitening."""

    def compute() -> Tensor:
        found = ESTIMATORS[name](
            AdvantageInputs(
                token_rewards(torch.tensor(scores), kept, None, 0.0),
                kept,
                groups=torch.arange(len(scores)) // n,
                num_groups=len(scores) // n,
                values=values,
                baseline_scores=None if baseline is None else torch.tensor(baseline),
            ),
            AdvantageOptions(**options),  # type: ignore[arg-type]
        )
        parts = [found.advantages] if found.returns is None else [found.advantages, found.returns]
        return torch.cat([part.flatten() for part in parts])

    return Row(f"{name} {what}", compute, expected)


LONG = mask("1" * 40)
ONES = row(*[0.0] * 40)
ADVANTAGES = [
    gae_row("γ λ 1", row(0, 0, 1), row(0.5, 0.25, 0.75), mask("111"), 1, 1, [0.5, 0.75, 0.25, 1, 1, 1]),
    gae_row("λ 0", row(0, 0, 1), row(0.5, 0.25, 0.75), mask("111"), 1, 0, [-0.25, 0.5, 0.25, 0.25, 0.75, 1]),
    gae_row("γ λ ½", row(0, 0, 1), row(0.5, 0.25, 0.75), mask("111"), 0.5, 0.5, [*HALF, 0.171875, 0.4375, 1]),
    gae_row(
        "γ λ ½ over a gap of two tokens that hold 9 and NaN",
        row(0, 9, NAN, 0, 1), row(0.5, NAN, 9, 0.25, 0.75), mask("10011"), 0.5, 0.5,
        [HALF[0], 0, 0, HALF[1], HALF[2], 0.171875, 0, 0, 0.4375, 1],
    ),
    gae_row("with a NaN prompt and padding", row(NAN, 0, 1, NAN), row(NAN, 0.5, 0.25, NAN), mask("0110"), 1, 1,
            [0, 0.5, 0.75, 0, 0, 1, 1, 0]),
    gae_row("of length zero, NaN everywhere", row(NAN, NAN), row(NAN, NAN), mask("00"), 0.9, 0.9, [0, 0, 0, 0]),
    gae_row("of one token", row(2), row(0.5), mask("1"), 0.9, 0.9, [1.5, 2]),
    gae_row("dense rewards, γ ½", row(1, 1, 1), row(0, 0, 0), mask("111"), 0.5, 1, [1.75, 1.5, 1, 1.75, 1.5, 1]),
    estimator(
        "gae", [1], mask("111"), [-0.25, 0.5, 0.25, 1, 1, 1], what="λ actor 0, λ critic 1: advantages, returns", n=1,
        values=row(0.5, 0.25, 0.75), lam_actor=0.0, lam_critic=1.0,
    ),
    # λ = 1 − 1 / (0.05 · 40) = ½; the last δ is 1, all others 0 with values 0.
    estimator("vapo", [1], LONG, [0.5 ** (39 - t) for t in range(40)] + [1.0] * 40, what="40 tokens: λ ½, returns 1",
              n=1, values=ONES, length_alpha=0.05, lam_critic=1.0),
    estimator("vapo", [1], mask("111"), [0, 0, 1, 1, 1, 1], what="3 tokens: λ held at 0", n=1, values=row(0, 0, 0),
              length_alpha=0.05, lam_critic=1.0),
    # Scores 1, 3: mean 2, unbiased std √2.
    estimator("grpo", [1, 3], mask("011", "001"), [0, -0.7071063, -0.7071063, 0, 0, 0.7071063],
              what="(1, 3) over std √2 + 1e-6"),
    estimator("grpo", [1, 3], mask("01", "01"), [0, -1, 0, 1], what="(1, 3) without the division", norm_by_std=False),
    estimator("grpo", [2, 2], mask("01", "01"), [0, 0, 0, 0], what="of equal scores"),
    estimator("grpo", [1, 9, 3], mask("1", "0", "1"), [-1, 0, 1], what="the empty response is in no mean", n=3,
              norm_by_std=False),
    estimator("grpo", [5, 1], mask("1", "0"), [0, 0], what="alone with an empty response", norm_by_std=True),
    estimator("rloo", [1, 2, 6], mask("1", "1", "1"), [-3, -1.5, 4.5], what="(1, 2, 6): less the mean of the others",
              n=3),
    estimator("rloo", [1, 2, 6], mask("1", "1", "0"), [-1, 1, 0], what="two of three have tokens", n=3),
    estimator("reinforce_plus_plus", [4], mask("1101"), [1, 2, 0, 4], what="γ ½ over a gap", n=1, gamma=0.5),
    estimator("reinforce_plus_plus_baseline", [1, 3], mask("011", "001"), [0, -1, -1, 0, 0, 1], what="(1, 3)"),
    estimator("reinforce_plus_plus_baseline", [1, 5], mask("11", "11"), [-1, -2, 1, 2], what="(1, 5), γ ½", gamma=0.5),
    estimator("remax", [1, 3], mask("011", "001"), [0, 0.5, 0.5, 0, 0, 2.5], what="greedy ½", baseline=[0.5, 0.5]),
    Row("whitening of 1 2 3 6, NaN and 99 masked: (A − 3) / √(14/3)",
        lambda: whiten(torch.tensor([[1.0, 99, 2], [3, 6, NAN]]), mask("101", "110")),
        [x / math.sqrt(14 / 3) for x in (-2, 0, -1, 0, 3, 0)]),
    Row("whitening of equal advantages", lambda: whiten(row(7, 7, 7), mask("111")), [0, 0, 0]),
    Row("scores 0 0 1 1 standardised, an empty one left out",
        lambda: standardized(torch.tensor([0.0, 9, 0, 1, 1]), torch.tensor([True, False, True, True, True])),
        [x / math.sqrt(1 / 3) for x in (-0.5, 0, -0.5, 0.5, 0.5)]),
    Row("moments of 1 2 NaN 6: count, mean, variance", lambda: _moments(), [3, 3, 7]),
    Row("token rewards: score 1 on the last token − ¼ · k1",
        lambda: token_rewards(torch.tensor([1.0]), mask("0110"), row(NAN, 2, 2, NAN), 0.25), [0, -0.5, 0.5, 0]),
    Row("token rewards of length zero", lambda: token_rewards(torch.tensor([5.0]), mask("00"), row(NAN, NAN), 0.25),
        [0, 0]),
]  # fmt: skip


def _moments() -> Tensor:
    found = global_moments(row(1, 2, NAN, 6), mask("1101"), lambda partial: partial)
    return torch.tensor([found.count, found.mean, found.variance])


def policy(
    name: str, ratios: list[float], advantages: list[float], expected: list[float], what: str, **clip: float
) -> Row:
    """Per-token losses, then their gradients to log π, of one sequence with old log-probs of −1."""
    limits = ClipRange(clip.get("low", 0.2), clip.get("high", 0.2), clip.get("dual", 3.0))

    def loss(x: Tensor) -> Tensor:
        kept = torch.ones_like(x, dtype=torch.bool)
        return POLICY_LOSSES[name](x, torch.full_like(x, -1.0), row(*advantages), kept, limits).per_token

    return Row(f"{name} {what}", lambda: with_gradient(loss, [math.log(ratio) - 1 for ratio in ratios]), expected, 3e-6)


LOSSES = [
    policy("vanilla", [1.0], [2], [-2, -2], "ρ 1, A 2"),
    policy("vanilla", [1.5], [2], [-2.4, 0], "ρ 1.5, A 2: clipped above"),
    policy("vanilla", [0.5], [2], [-1, -1], "ρ 0.5, A 2: not clipped"),
    policy("vanilla", [0.5], [-2], [1.6, 0], "ρ 0.5, A −2: clipped below"),
    policy("vanilla", [1.25], [2], [-2.5, -2.5], "ρ 1.25, A 2, clip above 0.28", high=0.28),
    policy("vanilla", [5.0], [-2], [6, 0], "ρ 5, A −2, c 3: dual clip"),
    policy("vanilla", [2.5], [-2], [5, 5], "ρ 2.5, A −2: below the dual clip"),
    policy("vanilla", [1.0], [0], [0, 0], "A 0"),
    policy("vanilla", [math.exp(30)], [-1], [math.exp(20), 0], "log ρ 30 held at 20", dual=1e12),
    policy("gspo", [2.0, 0.5], [1, 1], [-1, -1, -1, -1], "ρ (2, ½): s 1 on both tokens", low=3e-4, high=4e-4),
    policy("gspo", [2.0, 8.0], [-1, -1], [4, 4, 4, 4], "ρ (2, 8), A −1: s 4, no dual clip", low=3e-4, high=4e-4),
    policy("gspo", [2.0, 8.0], [1, 1], [-1.0004, -1.0004, 0, 0], "ρ (2, 8), A 1: clipped", low=3e-4, high=4e-4),
    policy("cispo", [1.0], [2], [2, -2], "ρ 1, A 2: −A log π, its gradient −A"),
    policy("cispo", [5.0], [2], [-1.2 * 2 * (math.log(5) - 1), -2.4], "ρ 5, A 2: weight 1.2, gradient kept"),
    policy("cispo", [0.5], [-1], [0.8 * (math.log(0.5) - 1), 0.8], "ρ ½, A −1: weight 0.8"),
    Row("cispo, vanilla, gspo with NaN where masked", lambda: _masked_losses(), [2, 0, -1, 0, -1, 0]),
]


def _masked_losses() -> Tensor:
    parts = [
        POLICY_LOSSES[name](row(-2, NAN), row(-2, NAN), row(1, NAN), mask("10"), ClipRange(0.2, 0.2)).per_token
        for name in ("cispo", "vanilla", "gspo")
    ]
    return torch.cat(parts)


def value(v: float, old: float, target: float, expected: list[float], what: str) -> Row:
    def loss(x: Tensor) -> Tensor:
        return value_loss(x, row(old), row(target), mask("1"), 0.5).per_token

    return Row(f"value loss {what}", lambda: with_gradient(loss, [v]), expected)


VALUES = [
    value(2, 1, 0.5, [1.125, 1.5], "v_old 1, v 2, R 0.5, ε 0.5: the unclipped error is the larger"),
    value(2, 1, 3, [1.125, 0], "v_old 1, v 2, R 3: held at 1.5"),
    value(1.2, 1, 3, [1.62, -1.8], "v_old 1, v 1.2, R 3: inside the range"),
]

# Three sequences of 2, 3 and 0 response tokens with losses 1 3 | 2 4 6 | none, cut in uneven ways.
PER_TOKEN = torch.tensor([[NAN, 1.0, 3.0, NAN], [2.0, NAN, 4.0, 6.0], [NAN, NAN, NAN, NAN]])
KEPT = mask("0110", "1011", "0000")
CUTS = {"whole": [[0, 1, 2]], "micro-batches 2 + 1": [[0, 2], [1]], "3 ranks, one empty": [[2], [1], [0]]}


def aggregation(mode: str, cut: str, expected: float) -> Row:
    def total() -> Tensor:
        denominators = Denominators.of(KEPT)
        shares = [aggregate(PER_TOKEN[rows], KEPT[rows], mode, denominators, scale_length=8) for rows in CUTS[cut]]
        return torch.stack(shares).sum()

    return Row(f"{mode}, {cut}", total, expected)


AGGREGATIONS = [
    aggregation(mode, cut, expected)
    for mode, expected in (
        ("token-mean", 16 / 5),
        ("seq-mean-token-sum", (4 + 12) / 2),
        ("seq-mean-token-mean", (2 + 4) / 2),
        ("seq-mean-token-sum-norm", (4 + 12) / 2 / 8),
    )
    for cut in CUTS
]

# d = ln 4, ln ½, ln 1 on tokens 1-3; token 0 is a prompt's.
OLD, ROLLOUT = row(NAN, math.log(4), math.log(0.5), 0), row(NAN, 0, 0, 0)


def correction(kind: str, expected: list[float], what: str, **limits: float) -> Row:
    return Row(
        f"{kind} {what}",
        lambda: correction_weights(kind, OLD, ROLLOUT, mask("0111"), CorrectionLimits(**limits)),  # type: ignore[arg-type]
        expected,
    )


CORRECTIONS = [
    correction("token", [0, 2, 0.5, 1], "w (4, ½, 1): at most 2"),
    correction("token", [0, 4, 0.5, 1], "w (4, ½, 1): at most 8", threshold=8.0),
    correction("sequence", [0, 2, 2, 2], "w 4 · ½ · 1 on each token"),
    correction("sequence", [0, 1.5, 1.5, 1.5], "w 2: at most 1.5", threshold=1.5),
    correction("icepop", [0, 1, 1, 1], "w (4, ½, 1): all in [0.5, 5]", icepop_low=0.4999),
    correction("icepop", [0, 0, 0, 1], "w (4, ½, 1): [0.6, 3] keeps the last", icepop_low=0.6, icepop_high=3.0),
]

CONFIGURED = [
    Row("clip_ratio alone takes effect", lambda: torch.tensor(ActorConfig(clip_ratio=0.1).clip_range), [0.1, 0.1]),
    Row("gspo's own clip range", lambda: torch.tensor(_gspo().clip_range), [3e-4, 4e-4], 1e-9),
    Row("entropy bonus 0.01 → 0 over 10 steps, at 0, 5, 20",
        lambda: torch.tensor([_decaying().entropy_coeff_at(step) for step in (0, 5, 20)]), [0.01, 0.005, 0], 1e-8),
]  # fmt: skip


def _gspo() -> ActorConfig:
    return ActorConfig.model_validate({"policy_loss": {"loss_mode": "gspo"}})


def _decaying() -> ActorConfig:
    return ActorConfig(entropy_coeff=0.01, entropy_decay_steps=10)


ROWS = [*KL, *CONTROLLER, *ADVANTAGES, *LOSSES, *VALUES, *AGGREGATIONS, *CORRECTIONS, *CONFIGURED]


@pytest.mark.parametrize("case", ROWS, ids=lambda case: case.name)
def test_value(case: Row) -> None:
    case.check()


def test_the_table() -> None:
    """Printed by `pytest -s`."""
    print_table("values of algorithms", ROWS)
    assert len(ROWS) >= 60
    assert len({case.name for case in ROWS}) == len(ROWS)


def test_exact_kl_is_no_estimator() -> None:
    for name in ("full", "full+"):
        with pytest.raises(AssertionError, match="is exact and has its own gradient"):
            kl_estimate(name, row(0), row(0))
