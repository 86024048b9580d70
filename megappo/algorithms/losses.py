"""Per-token losses of policy and value, before aggregation (`aggregate.py`); [B, T], float32, 0 where masked."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.algorithms.masked import keep

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class PolicyLossTerms:
    """What `policy_loss` computes of each token, all [B, T] and 0 (False) where masked; only `per_token` has a graph.

    `per_token` the loss · `ratio` ρ · `kl` −log ρ, whose mean is `actor/ppo_kl` · `clipped` the upper or lower clip is
    active (`actor/pg_clipfrac`) · `dual_clipped` the dual clip is (`actor/pg_clipfrac_lower`).
    """

    per_token: Tensor
    ratio: Tensor
    kl: Tensor
    clipped: Tensor
    dual_clipped: Tensor


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> PolicyLossTerms:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7), two-sided clip range, dual clip (arXiv 1912.09729, eq. 5).

    With ρ = exp(clamp(log π − old_log π, −20, 20)): L1 = −A ρ, L2 = −A clip(ρ, 1 − clip_low, 1 + clip_high),
    m = max(L1, L2), and min(m, −A · clip_c) where A < 0. Inputs [B, T]; gradients flow into `log_probs` alone.
    """
    log_probs = keep(mask, log_probs.float())
    old_log_probs = keep(mask, old_log_probs.detach().float())
    advantages = keep(mask, advantages.detach().float())

    log_ratio = torch.clamp(log_probs - old_log_probs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = torch.exp(log_ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - clip_low, 1.0 + clip_high)
    pessimistic = torch.maximum(unclipped, clipped)
    bound = -advantages * clip_c
    bounded = (advantages < 0) & (pessimistic > bound)
    per_token = torch.where(bounded, bound, pessimistic)
    return PolicyLossTerms(
        per_token=keep(mask, per_token),
        ratio=keep(mask, ratio.detach()),
        kl=keep(mask, -log_ratio.detach()),
        clipped=mask & (clipped > unclipped).detach(),
        dual_clipped=mask & bounded.detach(),
    )


@dataclass(frozen=True)
class ValueLossTerms:
    """What `value_loss` computes of each token, [B, T] and 0 (False) where masked: the loss with its ½, and where the
    clipped value was the worse one (`critic/vf_clipfrac`)."""

    per_token: Tensor
    clipped: Tensor


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip_range: float) -> ValueLossTerms:
    """½ max((v − R)², (clip(v, v_old − ε, v_old + ε) − R)²) of each token, ε = `clip_range`, in units of the value.

    Inputs [B, T]; gradients flow into `values` alone, and none where the larger term is clipped.
    """
    values = keep(mask, values.float())
    old_values = keep(mask, old_values.detach().float())
    returns = keep(mask, returns.detach().float())

    clipped_values = torch.clamp(values, old_values - clip_range, old_values + clip_range)
    unclipped = (values - returns).square()
    clipped = (clipped_values - returns).square()
    return ValueLossTerms(
        per_token=keep(mask, 0.5 * torch.maximum(unclipped, clipped)), clipped=mask & (clipped > unclipped).detach()
    )
