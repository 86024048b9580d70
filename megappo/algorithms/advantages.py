"""From sequence scores to advantages: token rewards, the table of estimators, whitening. All [B, T], 0 where masked."""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from megappo.algorithms.kl import kl_estimate
from megappo.algorithms.masked import SumOverRanks, global_moments, keep, one_rank

WHITEN_EPS = 1e-8


def token_rewards(
    scores: Tensor,
    mask: Tensor,
    old_log_probs: Tensor,
    ref_log_probs: Tensor | None,
    beta: float,
    kl_penalty: str,
) -> Tensor:
    """Rewards of each token, [B, T] float32: the score [B] on a sequence's last response token, less β · KL on each.

    `ref_log_probs` None leaves the penalty out. A sequence without response tokens gets nothing anywhere.
    """
    rewards = torch.where(is_last_response_token(mask), scores.detach().float()[:, None], 0.0)
    if ref_log_probs is None:
        return rewards
    penalty = kl_estimate(kl_penalty, old_log_probs.detach(), ref_log_probs.detach(), mask)
    return rewards - beta * keep(mask, penalty)


def is_last_response_token(mask: Tensor) -> Tensor:
    """[B, T] bool with one True in each row of `mask` that has any: at its last one."""
    places = torch.arange(mask.shape[-1], device=mask.device)
    last = torch.where(mask, places, -1).amax(dim=-1, keepdim=True)
    return mask & (places == last)


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438) over response tokens: (advantages, returns), [B, T] float32.

    δ_t = r_t + γ V_next − V_t and A_t = δ_t + γ λ A_next, where "next" is the next *response* token: a gap in the mask
    neither discounts nor bootstraps, and nothing follows the last one. returns = advantages + values, before whitening.
    """
    # float64 inside: 30,000 undiscounted tokens would otherwise cost digits that a layout comparison needs.
    rewards, values = keep(mask, rewards).double(), keep(mask, values).double()
    next_value = values.new_zeros(values.shape[0])
    next_advantage = values.new_zeros(values.shape[0])
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = advantage
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
    advantages = keep(mask, advantages)
    return advantages.float(), keep(mask, advantages + values).float()


AdvantageEstimator = Callable[[Tensor, Tensor, Tensor, float, float], tuple[Tensor, Tensor]]
"""(token rewards, values, mask, gamma, lam) → (advantages, returns)."""

ESTIMATORS: dict[str, AdvantageEstimator] = {"gae": gae}
"""`algorithm.adv_estimator` → the function that computes it."""


def whiten(advantages: Tensor, mask: Tensor, sum_over_ranks: SumOverRanks = one_rank) -> Tensor:
    """(A − mean) / √(variance + 1e-8) over the response tokens of all ranks, unbiased variance; [B, T] float32.

    With fewer than two response tokens on all ranks there is no variance: the advantages come back unchanged, with a
    RuntimeWarning on every rank.
    """
    moments = global_moments(advantages, mask, sum_over_ranks)
    if moments.count < 2:
        warnings.warn(
            f"the step has {moments.count} response token(s): advantages are not whitened", RuntimeWarning, stacklevel=2
        )
        return keep(mask, advantages.float())
    centred = keep(mask, advantages).double() - moments.mean
    scale: float = (moments.variance + WHITEN_EPS) ** -0.5
    return keep(mask, (centred * scale).float())
