"""KL estimators: values and gradients against closed forms in float64; the controller against hand arithmetic."""

import math

import pytest
import torch

from megappo.algorithms.kl import KLController, kl_estimate

NAMES = ["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]

# (estimator, x, r, value, d value / dx), by hand: k3 = e^d - d - 1 with d = r - x, whose gradient is 1 - e^d.
CLOSED_FORMS = [
    ("k1", -1, -3, 2.0, 1.0),
    ("kl", -3, -1, -2.0, 1.0),
    ("k2", -1, -3, 2.0, 2.0),
    ("mse", -3, -1, 2.0, -2.0),
    ("abs", -1, -3, 2.0, 1.0),
    ("abs", -3, -1, 2.0, -1.0),
    ("abs", -2, -2, 0.0, 0.0),
    ("k3", -1, -3, math.exp(-2) + 1, 1 - math.exp(-2)),
    ("k3", -3, -1, math.exp(2) - 3, 1 - math.exp(2)),
    ("low_var_kl", -0.5, -0.25, math.exp(0.25) - 1.25, 1 - math.exp(0.25)),
    ("k3", -2, -2, 0.0, 0.0),
    # Clamped: the value stops at 10 and the gradient is 0; k1 and k2 have no clamp.
    ("k3", 0, -30, 10.0, 0.0),
    ("k3", -30, 0, 10.0, 0.0),
    ("k3", 0, -10.5, math.exp(-10.5) + 9.5, 1 - math.exp(-10.5)),
    ("k3", -200, 0, 10.0, 0.0),  # e^200 is infinite in float32: without the inner clamp the gradient is 0 · inf
    ("k3", 0, -200, 10.0, 0.0),
    ("k1", 0, -30, 30.0, 1.0),
    ("k2", -30, 0, 450.0, -30.0),
    # Straight through: value of the named, gradient of k2, which is x - r.
    ("k1+", -1, -3, 2.0, 2.0),
    ("kl+", -3, -1, -2.0, -2.0),
    ("abs+", -1, -3, 2.0, 2.0),
    ("k2+", -1, -3, 2.0, 2.0),
    ("mse+", -3, -1, 2.0, -2.0),
    ("k3+", -1, -3, math.exp(-2) + 1, 2.0),
    ("low_var_kl+", 0, -30, 10.0, 30.0),
]


@pytest.mark.parametrize(("name", "x", "r", "value", "gradient"), CLOSED_FORMS)
def test_value_and_gradient(name: str, x: float, r: float, value: float, gradient: float) -> None:
    log_prob = torch.tensor([float(x)], requires_grad=True)
    result = kl_estimate(name, log_prob, torch.tensor([float(r)]))
    result.sum().backward()
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(value, rel=2e-6, abs=1e-7)
    assert log_prob.grad is not None
    assert log_prob.grad.item() == pytest.approx(gradient, rel=2e-6, abs=1e-7)


def test_the_documented_digits() -> None:
    """The five digits that the definition quotes."""
    x = torch.tensor([-1.0], requires_grad=True)
    k3 = kl_estimate("k3", x, torch.tensor([-3.0]))
    (gradient,) = torch.autograd.grad(k3, x)
    assert (round(k3.item(), 5), round(gradient.item(), 5)) == (1.13534, 0.86466)


def test_k3_keeps_its_digits_close_to_the_reference() -> None:
    """At d = 1e-3 the naive float32 e^d - d - 1 has an error of 5%; d²/2 + d³/6 is exact to 1e-9 relative."""
    result = kl_estimate("k3", torch.tensor([0.0]), torch.tensor([1e-3])).item()
    assert result == pytest.approx(1e-6 / 2 + 1e-9 / 6, rel=2e-4)


def test_expected_gradient_of_k2_is_that_of_the_true_kl() -> None:
    """E_π[∇ k2] = ∇ KL(π ‖ ref) on a small vocabulary, exactly, in expectation over all tokens."""
    logits = torch.tensor([0.3, -1.0, 0.7, 0.1], requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.5, -0.5, 0.2]), dim=0)
    log_probs = torch.log_softmax(logits, dim=0)
    (true,) = torch.autograd.grad((log_probs.exp() * (log_probs - reference)).sum(), logits, retain_graph=True)
    for name in ("k2", "k1+", "k3+", "abs+"):
        surrogate = (log_probs.exp().detach() * kl_estimate(name, log_probs, reference)).sum()
        (expected,) = torch.autograd.grad(surrogate, logits, retain_graph=True)
        torch.testing.assert_close(expected, true, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", [*NAMES, *(f"{name}+" for name in NAMES)])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_places_are_never_read(name: str, poison: float) -> None:
    x = torch.tensor([[-1.0, poison]], requires_grad=True)
    result = kl_estimate(name, x, torch.tensor([[-3.0, poison]]), torch.tensor([[True, False]]))
    result.sum().backward()
    assert result[0, 1] == 0
    assert x.grad is not None
    assert x.grad[0, 1] == 0
    assert torch.isfinite(result).all()
    assert torch.isfinite(x.grad).all()


def test_unknown_names_are_refused() -> None:
    with pytest.raises(AssertionError, match="'k4' is no KL estimator"):
        kl_estimate("k4", torch.zeros(1), torch.zeros(1))


# (current KL, sequences, coefficient after one update from 0.1 with target 0.01 and horizon 1000)
ADAPTIVE_STEPS = [
    (0.01, 500, 0.1),  # on target
    (0.011, 500, 0.1 * (1 + 0.1 * 0.5)),  # error 0.1, half a horizon
    (0.1, 500, 0.1 * (1 + 0.2 * 0.5)),  # error 9, clipped to 0.2
    (0.0, 500, 0.1 * (1 - 0.2 * 0.5)),  # error -1, clipped to -0.2
    (-0.05, 1000, 0.1 * 0.8),  # k1 may be negative
    (0.009, 100, 0.1 * (1 - 0.1 * 0.1)),
    (0.0, 100_000, 0.1 * 0.8),  # a step of 100 horizons: without the min, β would be -1.9
    (0.1, 100_000, 0.1 * 1.2),
]


@pytest.mark.parametrize(("current", "num_sequences", "expected"), ADAPTIVE_STEPS)
def test_adaptive_controller(current: float, num_sequences: int, expected: float) -> None:
    controller = KLController("adaptive", kl_coef=0.1, target_kl=0.01, horizon=1000)
    controller.update(current, num_sequences)
    assert controller.coefficient == pytest.approx(expected, rel=1e-12)


def test_fixed_controller_stays() -> None:
    controller = KLController("fixed", kl_coef=0.1, target_kl=0.01, horizon=1000)
    controller.update(5.0, 10_000)
    assert controller.coefficient == 0.1


def test_adaptive_controller_goes_on_from_its_state() -> None:
    first = KLController("adaptive", 0.1, 0.01, 1000)
    first.update(0.1, 1000)
    second = KLController("adaptive", 0.1, 0.01, 1000)
    second.load_state_dict(first.state_dict())
    for controller in (first, second):
        controller.update(0.0, 500)
    assert first.coefficient == second.coefficient == pytest.approx(0.1 * 1.2 * 0.9)


def test_fixed_controller_obeys_the_configuration_on_resume() -> None:
    controller = KLController("fixed", 0.05, 0.01, 1000)
    controller.load_state_dict({"coefficient": 0.1})
    assert controller.coefficient == 0.05
