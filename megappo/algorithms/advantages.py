"""From scores to advantages: token rewards, the table of estimators, whitening. All [B, T], 0 where masked.

Means over the responses to one prompt are in `groups.py`.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.algorithms.groups import GroupMoments, group_moments
from megappo.algorithms.masked import SumOverRanks, global_moments, keep, one_rank

WHITEN_EPS = 1e-8
GRPO_EPS = 1e-6


def token_rewards(scores: Tensor, mask: Tensor, kl: Tensor | None, beta: float) -> Tensor:
    """Rewards of each token, [B, T] float32: the score [B] on a sequence's last response token, less β · KL on each.

    `kl` [B, T] is the penalty's estimate between old and reference policy; None leaves it out. A sequence without
    response tokens gets nothing anywhere.
    """
    rewards = torch.where(is_last_response_token(mask), scores.detach().float()[:, None], 0.0)
    return rewards if kl is None else rewards - beta * keep(mask, kl.detach().float())


def is_last_response_token(mask: Tensor) -> Tensor:
    """[B, T] bool with one True in each row of `mask` that has any: at its last one."""
    places = torch.arange(mask.shape[-1], device=mask.device)
    last = torch.where(mask, places, -1).amax(dim=-1, keepdim=True)
    return mask & (places == last)


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator may read. Per-token tensors are [B, T], per-sequence ones [B].

    `groups` numbers the prompt of each sequence among the step's `num_groups`, of which a rank may hold a part;
    `values` are there for estimators with a critic, `baseline_scores` (R of the greedy response) for `remax`.
    """

    rewards: Tensor
    mask: Tensor
    groups: Tensor
    num_groups: int
    values: Tensor | None = None
    baseline_scores: Tensor | None = None
    sum_over_ranks: SumOverRanks = one_rank


@dataclass(frozen=True)
class AdvantageOptions:
    """γ and λ of GAE (λ apart for advantages and returns; `length_alpha` makes the actor's depend on the response), and
    whether `grpo` divides by the group's standard deviation."""

    gamma: float = 1.0
    lam_actor: float = 1.0
    lam_critic: float = 1.0
    length_alpha: float | None = None
    norm_by_std: bool = True


@dataclass(frozen=True)
class Advantages:
    """[B, T] float32 each, before whitening; no returns from an estimator without a critic."""

    advantages: Tensor
    returns: Tensor | None = None


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438) over response tokens: (advantages, returns), [B, T] float32.

    δ_t = r_t + γ V_next − V_t and A_t = δ_t + γ λ A_next, where "next" is the next *response* token: a gap in the mask
    neither discounts nor bootstraps, and nothing follows the last one. returns = advantages + values, before whitening.
    `lam` is one number, or one for each sequence [B].
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


def length_adaptive_lam(mask: Tensor, alpha: float) -> Tensor:
    """λ = 1 − 1 / (alpha · response length) of each sequence, [B] float64 (VAPO, arXiv 2504.05118, eq. 7).

    Never below 0, which responses of up to 1 / alpha tokens would get.
    """
    lengths = mask.sum(dim=-1).clamp(min=1).double()
    return (1.0 - 1.0 / (alpha * lengths)).clamp(min=0.0)


def sequence_rewards(inputs: AdvantageInputs) -> Tensor:
    """R of each sequence, [B] float64: the sum of its token rewards, which is its score where no KL is taken off."""
    return keep(inputs.mask, inputs.rewards).double().sum(dim=-1)


def _spread(per_sequence: Tensor, mask: Tensor) -> Tensor:
    """The same number on each response token of a sequence."""
    return keep(mask, per_sequence.float()[:, None].expand(mask.shape))


def _gae(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """GAE with its own λ for the actor's advantages and for the critic's returns (decoupled GAE, arXiv 2503.01491)."""
    assert inputs.values is not None, "GAE reads the critic's values"
    lam: float | Tensor = options.lam_actor
    if options.length_alpha is not None:
        lam = length_adaptive_lam(inputs.mask, options.length_alpha)
    advantages, returns = gae(inputs.rewards, inputs.values, inputs.mask, options.gamma, lam)
    if isinstance(lam, Tensor) or lam != options.lam_critic:
        _, returns = gae(inputs.rewards, inputs.values, inputs.mask, options.gamma, options.lam_critic)
    return Advantages(advantages, returns)


def _grpo(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """(R − group mean) / (group std + 1e-6), unbiased std (arXiv 2402.03300); without the division Dr. GRPO's."""
    moments = _groups(inputs)
    centred = sequence_rewards(inputs) - moments.mean
    return Advantages(_spread(centred / (moments.std + GRPO_EPS) if options.norm_by_std else centred, inputs.mask))


def _rloo(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """R less the mean of the *other* responses to the prompt (arXiv 2402.14740): n / (n − 1) · (R − group mean)."""
    moments = _groups(inputs)
    factor = moments.count / (moments.count - 1).clamp(min=1)
    return Advantages(_spread(factor * (sequence_rewards(inputs) - moments.mean), inputs.mask))


def _reinforce_plus_plus(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """Discounted sum of the token rewards to come (arXiv 2501.03262); the batch is whitened after."""
    return Advantages(_rewards_to_come(inputs.rewards, inputs, options))


def _reinforce_plus_plus_baseline(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """The same, after the group mean is taken off each sequence's reward, on the token where its score lies."""
    mean = keep(is_last_response_token(inputs.mask), _spread(_groups(inputs).mean, inputs.mask))
    return Advantages(_rewards_to_come(inputs.rewards - mean, inputs, options))


def _remax(inputs: AdvantageInputs, options: AdvantageOptions) -> Advantages:
    """R less that of the greedy response to the same prompt (arXiv 2310.10505)."""
    assert inputs.baseline_scores is not None, "ReMax reads the scores of greedy responses"
    return Advantages(_spread(sequence_rewards(inputs) - inputs.baseline_scores.double(), inputs.mask))


def _rewards_to_come(rewards: Tensor, inputs: AdvantageInputs, options: AdvantageOptions) -> Tensor:
    """Σ_k γ^k r of the k-th response token from here: GAE with λ = 1 and no values."""
    return gae(rewards, torch.zeros_like(rewards), inputs.mask, options.gamma, 1.0)[0]


def _groups(inputs: AdvantageInputs) -> GroupMoments:
    """Of R over the responses to the same prompt; each sequence's own group's."""
    counts = inputs.mask.any(dim=-1)
    return group_moments(sequence_rewards(inputs), counts, inputs.groups, inputs.num_groups, inputs.sum_over_ranks)


AdvantageEstimator = Callable[[AdvantageInputs, AdvantageOptions], Advantages]

ESTIMATORS: dict[str, AdvantageEstimator] = {
    "gae": _gae,
    "vapo": _gae,
    "grpo": _grpo,
    "rloo": _rloo,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": _reinforce_plus_plus_baseline,
    "remax": _remax,
}
"""`algorithm.adv_estimator` → the function that computes it. `vapo` is GAE with other options."""


def standardized(scores: Tensor, counts: Tensor, sum_over_ranks: SumOverRanks = one_rank) -> Tensor:
    """(score − mean) / √(variance + 1e-8) over the sequences of all ranks where `counts` is true, unbiased; both [B].

    Fewer than two such sequences keep their scores.
    """
    moments = global_moments(scores, counts, sum_over_ranks)
    if moments.count < 2:
        return keep(counts, scores.float())
    scale: float = (moments.variance + WHITEN_EPS) ** -0.5
    return keep(counts, ((keep(counts, scores).double() - moments.mean) * scale).float())


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
