"""The advantage phase: scores and KL penalty become token rewards, and these become advantages of the global batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.algorithms.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    AdvantageOptions,
    standardized,
    token_rewards,
    whiten,
)
from megappo.algorithms.correction import CorrectionLimits, correction_weights
from megappo.algorithms.kl import EXACT, KLController, kl_estimate
from megappo.algorithms.masked import keep
from megappo.config.algorithm import VAPO_LENGTH_ALPHA, AlgorithmConfig
from megappo.experience.batch import ExperienceBatch
from megappo.parallel.collectives import sum_over
from megappo.parallel.mesh import Mesh
from megappo.trainer.experience_metrics import sequence_mean


@dataclass(frozen=True)
class AdvantagePhase:
    """Fills `token_rewards`, `advantages`, `returns` (with a critic) and `loss_weights` (with a correction), and moves
    the KL coefficient once a step. The step has `num_prompts` prompts of `num_samples` responses."""

    config: AlgorithmConfig
    controller: KLController
    mesh: Mesh
    num_prompts: int
    num_samples: int

    def fill(self, batch: ExperienceBatch) -> ExperienceBatch:
        """The coefficient of this step is read here; `update_coefficient` changes it for the next one."""
        mask, over_ranks = batch.padded(batch.response_mask), sum_over(self.mesh.dp_group, self.mesh.device)
        scores = batch.get("scores")
        if self.config.normalize_scores:
            scores = standardized(scores, mask.any(dim=-1), over_ranks)
        kl = batch.padded(self._penalty(batch)) if self.config.use_kl_in_reward else None
        rewards = token_rewards(scores, mask, kl, self.controller.coefficient)
        if batch.token_scores is not None:
            rewards = rewards + keep(mask, batch.padded(batch.token_scores))
        estimate = ESTIMATORS[self.config.adv_estimator]
        found = estimate(
            AdvantageInputs(
                rewards,
                mask,
                groups=batch.positions // self.num_samples,
                num_groups=self.num_prompts,
                values=batch.padded(batch.get("values")) if self.config.needs_critic else None,
                baseline_scores=batch.baseline_scores,
                sum_over_ranks=over_ranks,
            ),
            advantage_options(self.config),
        )
        advantages = whiten(found.advantages, mask, over_ranks) if self.config.whitens else found.advantages
        batch = batch.fill(token_rewards=batch.flat(rewards), advantages=batch.flat(advantages))
        if found.returns is not None:
            batch = batch.fill(returns=batch.flat(found.returns))
        return self._corrected(batch, mask)

    def taken_off(self, batch: ExperienceBatch) -> Tensor:
        """[tokens]: what the KL takes off the token rewards of a step whose coefficient is not updated yet."""
        if not self.config.use_kl_in_reward:
            return torch.zeros(batch.num_tokens)
        return self.controller.coefficient * self._penalty(batch)

    def update_coefficient(self, batch: ExperienceBatch) -> dict[str, float]:
        """Adapts the coefficient to this step's KL; returns the one that the step used."""
        used = self.controller.coefficient
        if not self.config.use_kl_in_reward:
            return {}
        current, sequences = sequence_mean(batch, self._penalty(batch), self.mesh)
        self.controller.update(current, sequences)
        return {"kl/reward_coef": used}

    def _corrected(self, batch: ExperienceBatch, mask: Tensor) -> ExperienceBatch:
        correction = self.config.rollout_correction
        if correction.rollout_is is None:
            return batch
        weights = correction_weights(
            correction.rollout_is,
            batch.padded(batch.get("old_log_probs")),
            batch.padded(batch.rollout_log_probs),
            mask,
            CorrectionLimits(correction.rollout_is_threshold, correction.icepop_low, correction.icepop_high),
        )
        return batch.fill(loss_weights=batch.flat(weights))

    def _penalty(self, batch: ExperienceBatch) -> Tensor:
        """[tokens]: the KL between old and reference policy that the reward is charged with."""
        if self.config.kl_penalty == EXACT:
            return batch.get("ref_kl")
        return kl_estimate(
            self.config.kl_penalty, batch.get("old_log_probs"), batch.get("ref_log_probs"), batch.response_mask
        )


def advantage_options(config: AlgorithmConfig) -> AdvantageOptions:
    """`vapo` is GAE with λ 1 for the critic and a λ that grows with the response for the actor (arXiv 2504.05118)."""
    is_vapo = config.adv_estimator == "vapo"
    lam_critic = config.lam_critic if config.lam_critic is not None else (1.0 if is_vapo else config.lam)
    return AdvantageOptions(
        gamma=config.gamma,
        lam_actor=config.lam if config.lam_actor is None else config.lam_actor,
        lam_critic=lam_critic,
        length_alpha=config.lam_length_alpha or (VAPO_LENGTH_ALPHA if is_vapo else None),
        norm_by_std=config.norm_adv_by_std_in_grpo,
    )
