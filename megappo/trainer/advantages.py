"""The advantage phase: scores and KL penalty become token rewards, and these become advantages of the global batch."""

from __future__ import annotations

from dataclasses import dataclass

from megappo.algorithms.advantages import ESTIMATORS, token_rewards, whiten
from megappo.algorithms.kl import KLController, kl_estimate
from megappo.config.algorithm import AlgorithmConfig
from megappo.experience.batch import ExperienceBatch
from megappo.parallel.collectives import sum_over
from megappo.parallel.mesh import Mesh
from megappo.trainer.experience_metrics import sequence_mean


@dataclass(frozen=True)
class AdvantagePhase:
    """Fills `token_rewards`, `advantages` and `returns`, and moves the KL coefficient once a step."""

    config: AlgorithmConfig
    controller: KLController
    mesh: Mesh

    def fill(self, batch: ExperienceBatch) -> ExperienceBatch:
        """The coefficient of this step is read here; `update_coefficient` changes it for the next one."""
        mask = batch.padded(batch.response_mask)
        with_kl = self.config.use_kl_in_reward
        rewards = token_rewards(
            batch.get("scores"),
            mask,
            old_log_probs=batch.padded(batch.get("old_log_probs")),
            ref_log_probs=batch.padded(batch.get("ref_log_probs")) if with_kl else None,
            beta=self.controller.coefficient,
            kl_penalty=self.config.kl_penalty,
        )
        estimate = ESTIMATORS[self.config.adv_estimator]
        advantages, returns = estimate(
            rewards, batch.padded(batch.get("values")), mask, self.config.gamma, self.config.lam
        )
        if self.config.whiten_advantages:
            advantages = whiten(advantages, mask, sum_over(self.mesh.dp_group, self.mesh.device))
        return batch.fill(
            token_rewards=batch.flat(rewards), advantages=batch.flat(advantages), returns=batch.flat(returns)
        )

    def update_coefficient(self, batch: ExperienceBatch) -> dict[str, float]:
        """Adapts the coefficient to this step's KL; returns the one that the step used."""
        used = self.controller.coefficient
        if not self.config.use_kl_in_reward:
            return {}
        kl = kl_estimate(
            self.config.kl_penalty, batch.get("old_log_probs"), batch.get("ref_log_probs"), batch.response_mask
        )
        current, sequences = sequence_mean(batch, kl, self.mesh)
        self.controller.update(current, sequences)
        return {"kl/reward_coef": used}
