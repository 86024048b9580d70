"""Per-token losses of policy and value, before aggregation (`aggregate.py`); [B, T], float32, 0 where masked."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.algorithms.masked import OverSequence, keep, over_rows

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class ClipRange:
    """Distances of the ratio's clip from 1, and the dual clip's bound in units of |advantage|."""

    low: float
    high: float
    dual: float = 3.0


@dataclass(frozen=True)
class PolicyLossTerms:
    """What a policy loss computes of each token, all [B, T] and 0 (False) where masked; only `per_token` has a graph.

    `per_token` the loss · `ratio` that the clip looks at (ρ, or the sequence's) · `kl` −log ρ, whose mean is
    `actor/ppo_kl` · `clipped` the upper or lower clip is active (`actor/pg_clipfrac`) · `dual_clipped` the dual clip is
    (`actor/pg_clipfrac_lower`).
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
    clip: ClipRange,
    over_sequence: OverSequence = over_rows,
) -> PolicyLossTerms:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7), two-sided clip range, dual clip (arXiv 1912.09729, eq. 5).

    With ρ = exp(clamp(log π − old_log π, −20, 20)): L1 = −A ρ, L2 = −A clip(ρ, 1 − low, 1 + high), m = max(L1, L2),
    and min(m, −A · dual) where A < 0. Inputs [B, T]; gradients flow into `log_probs` alone.
    """
    log_ratio, advantages = _log_ratio(log_probs, old_log_probs, advantages, mask)
    ratio = torch.exp(log_ratio)
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - clip.low, 1.0 + clip.high)
    pessimistic = torch.maximum(unclipped, clipped)
    bound = -advantages * clip.dual
    bounded = (advantages < 0) & (pessimistic > bound)
    per_token = torch.where(bounded, bound, pessimistic)
    return _terms(per_token, ratio, log_ratio, mask, clipped > unclipped, bounded)


def gspo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: ClipRange,
    over_sequence: OverSequence = over_rows,
) -> PolicyLossTerms:
    """Group sequence policy optimization (arXiv 2507.18071, eq. 14): PPO's clip on the sequence's ratio.

    s = exp(mean over response tokens of log π − old_log π); each token carries the value of s and the gradient of its
    own log π. There is no dual clip. To be aggregated by `seq-mean-token-mean`.
    """
    log_ratio, advantages = _log_ratio(log_probs, old_log_probs, advantages, mask)
    difference = keep(mask, log_probs.float()) - keep(mask, old_log_probs.detach().float())
    lengths = over_sequence(mask.float()).clamp(min=1)
    mean = torch.clamp(over_sequence(difference.detach()) / lengths, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = torch.exp(mean + (difference - difference.detach()))
    unclipped = -advantages * ratio
    clipped = -advantages * torch.clamp(ratio, 1.0 - clip.low, 1.0 + clip.high)
    never = torch.zeros_like(mask)
    return _terms(torch.maximum(unclipped, clipped), ratio, log_ratio, mask, clipped > unclipped, never)


def cispo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: ClipRange,
    over_sequence: OverSequence = over_rows,
) -> PolicyLossTerms:
    """Clipped importance sampling weights (MiniMax-M1, arXiv 2506.13585, eq. 4): −stopgrad(clip(ρ)) · A · log π.

    Clipped tokens keep a gradient, unlike PPO's. There is no dual clip.
    """
    log_ratio, advantages = _log_ratio(log_probs, old_log_probs, advantages, mask)
    ratio = torch.exp(log_ratio.detach())
    weight = torch.clamp(ratio, 1.0 - clip.low, 1.0 + clip.high)
    per_token = -weight * advantages * keep(mask, log_probs.float())
    return _terms(per_token, ratio, log_ratio, mask, weight != ratio, torch.zeros_like(mask))


PolicyLoss = Callable[[Tensor, Tensor, Tensor, Tensor, ClipRange, OverSequence], PolicyLossTerms]

POLICY_LOSSES: dict[str, PolicyLoss] = {"vanilla": policy_loss, "gspo": gspo_loss, "cispo": cispo_loss}
"""`actor.policy_loss.loss_mode` → the function that computes it."""


def _log_ratio(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(clamp(log π − old_log π, −20, 20), advantages) in float32, 0 where masked."""
    log_probs = keep(mask, log_probs.float())
    old_log_probs = keep(mask, old_log_probs.detach().float())
    log_ratio = torch.clamp(log_probs - old_log_probs, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio, keep(mask, advantages.detach().float())


def _terms(
    per_token: Tensor, ratio: Tensor, log_ratio: Tensor, mask: Tensor, clipped: Tensor, dual_clipped: Tensor
) -> PolicyLossTerms:
    return PolicyLossTerms(
        per_token=keep(mask, per_token),
        ratio=keep(mask, ratio.detach()),
        kl=keep(mask, -log_ratio.detach()),
        clipped=mask & clipped.detach(),
        dual_clipped=mask & dual_clipped.detach(),
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
