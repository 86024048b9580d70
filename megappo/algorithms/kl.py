"""Per-token estimators of KL(π ‖ π_ref) from the sampled token's two log-probs, and the controller of the coefficient.

Estimators k1-k3: J. Schulman, "Approximating KL divergence", 2020.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor

from megappo.algorithms.masked import keep

EXACT = "full"
"""The estimator that is none: the sum over the whole vocabulary, which needs both models' logits
(`parallel/vocab.py`)."""


def kl_estimate(name: str, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor | None = None) -> Tensor:
    """The estimator `name` (`kl`/`k1`, `abs`, `mse`/`k2`, `low_var_kl`/`k3`) per token: float32, any shape.

    A trailing `+` is the straight-through form: the value of the named estimator with the gradient of k2, whose
    expectation is the gradient of the reverse KL. Log-probs are in nats. With `mask`, masked places are never read:
    their value and gradient are 0; pass it wherever they may hold anything but numbers.
    """
    log_probs, ref_log_probs = log_probs.float(), ref_log_probs.float()
    if mask is not None:
        log_probs, ref_log_probs = keep(mask, log_probs), keep(mask, ref_log_probs)
    base = name.removesuffix("+")
    assert base != EXACT, f"{name!r} is no estimator from two log-probs; {EXACT} is exact and has its own gradient"
    assert base in _ESTIMATORS, f"{name!r} is no KL estimator: {', '.join(_ESTIMATORS)}, each also with +"
    value = _ESTIMATORS[base](log_probs, ref_log_probs)
    if base == name:
        return value
    squared = _k2(log_probs, ref_log_probs)
    return value.detach() + (squared - squared.detach())


def _k1(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return log_probs - ref_log_probs


def _abs(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return (log_probs - ref_log_probs).abs()


def _k2(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return 0.5 * (log_probs - ref_log_probs).square()


def _k3(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    difference = torch.clamp(ref_log_probs - log_probs, -20.0, 20.0)
    # expm1 keeps the digits that exp(d) - 1 loses near d = 0, where a policy that has just started always is.
    return torch.clamp(torch.expm1(difference) - difference, -10.0, 10.0)


_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": _k1,
    "k1": _k1,
    "abs": _abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}


class KLController:
    """The coefficient β of the KL penalty in the reward: constant, or driven towards a target.

    Adaptive (Ziegler et al., arXiv 1909.08593, §2.2), after each step of n sequences:
    `β ← β · (1 + clip(current / target − 1, −0.2, 0.2) · min(1, n / horizon))`.
    The `min` keeps β positive for a step larger than the horizon. Read `coefficient` before `update` within a step.
    """

    def __init__(self, kind: Literal["fixed", "adaptive"], kl_coef: float, target_kl: float, horizon: int) -> None:
        assert target_kl > 0 and horizon > 0, f"target_kl {target_kl} and horizon {horizon} must be positive"
        self._kind = kind
        self._target_kl = target_kl
        self._horizon = horizon
        self._coefficient = kl_coef

    @property
    def coefficient(self) -> float:
        """β of this step."""
        return self._coefficient

    def update(self, current_kl: float, num_sequences: int) -> None:
        """Moves β once a step. `current_kl`: mean over the step's sequences of their masked token mean of the penalty's
        estimator, in nats, over all ranks; `num_sequences`: sequences of the step on all ranks."""
        if self._kind == "fixed":
            return
        error = min(max(current_kl / self._target_kl - 1.0, -0.2), 0.2)
        self._coefficient *= 1.0 + error * min(1.0, num_sequences / self._horizon)

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"coefficient": self._coefficient}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Goes on from a checkpoint; a fixed controller keeps the coefficient of its configuration."""
        if self._kind == "adaptive":
            self._coefficient = float(state["coefficient"])
