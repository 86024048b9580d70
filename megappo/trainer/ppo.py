"""PPO, top to bottom: one step is one rollout and its updates.

Wiring is in build.py, what surrounds a step in loop.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megappo.data.iterate import PromptOrder
from megappo.errors import ExitCode
from megappo.experience.batch import ExperienceBatch
from megappo.experience.sample import Prompt
from megappo.parallel.mesh import Mesh
from megappo.planner.batch import BatchPlan
from megappo.trainer.advantages import AdvantagePhase
from megappo.trainer.experience_metrics import experience_metrics, global_tokens
from megappo.trainer.loop import Loop
from megappo.trainer.minibatches import minibatches
from megappo.trainer.weight_switch import WeightSwitch
from megappo.workers.actor import ActorWorker
from megappo.workers.critic import CriticWorker
from megappo.workers.reference import NoReference, ReferenceWorker
from megappo.workers.reward import RewardWorker
from megappo.workers.rollout import RolloutWorker


@dataclass(frozen=True)
class PPOTrainer:
    """The PPO loop on the ranks of one training layout; every rank runs the same calls on its part of the batch."""

    mesh: Mesh
    plan: BatchPlan
    prompts: Sequence[Prompt]
    order: PromptOrder
    switch: WeightSwitch
    rollout: RolloutWorker
    reward: RewardWorker
    actor: ActorWorker
    critic: CriticWorker
    reference: ReferenceWorker | NoReference
    advantages: AdvantagePhase
    loop: Loop
    seed: int
    max_response_length: int

    def fit(self) -> ExitCode:
        """Trains until the last step, or until a signal asks to stop."""
        positions = self.plan.positions_of(self.mesh.dp_rank)
        for step in self.loop.steps():
            with step.phase("weight_sync"):
                step.record(self.switch.to_rollout(step.number))
            with step.phase("rollout"):
                prompts = [self.prompts[row] for row in self.order.next_batch()]
                samples = self.rollout.generate(prompts, positions, step.number, step.progress)
            with step.phase("weight_sync"):
                self.switch.to_training()
            with step.phase("reward"):
                scored = self.reward.score(samples)
                batch = ExperienceBatch.from_samples(samples).fill(scores=scored.score_tensor)
            with step.phase("old_log_probs"):
                batch = self.actor.fill_old_log_probs(batch)
            with step.phase("ref_log_probs"):
                batch = self.reference.fill_log_probs(batch)
            with step.phase("values"):
                batch = self.critic.fill_values(batch)
            with step.phase("advantages"):
                batch = self.advantages.fill(batch)
                step.record(experience_metrics(batch, scored.batch, self.mesh, self.max_response_length))
                step.record(self.advantages.update_coefficient(batch))
            with step.phase("update_critic"):
                for minibatch in minibatches(batch, self.plan.critic, seed=self.seed, step=step.number):
                    step.record_update(self.critic.update(minibatch))
            with step.phase("update_actor"):
                for minibatch in minibatches(batch, self.plan.actor, seed=self.seed, step=step.number):
                    step.record_update(self.actor.update(minibatch))
            step.finish(global_tokens(batch, self.mesh))
            self.loop.keep_samples(step.number, samples, scored)
        return self.loop.outcome

    def close(self) -> None:
        """Ends reward processes and the engine, after everything else that communicates."""
        self.loop.close()
