"""PPO, top to bottom: one step is one rollout and its updates.

Wiring is in build.py, what surrounds a step in loop.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from megappo.errors import ExitCode
from megappo.parallel.mesh import Mesh
from megappo.planner.batch import BatchPlan
from megappo.trainer.advantages import AdvantagePhase
from megappo.trainer.balance import Balance, NoBalance
from megappo.trainer.collect import Collector, GroupFilter
from megappo.trainer.experience_metrics import experience_metrics, global_tokens
from megappo.trainer.loop import Loop
from megappo.trainer.minibatches import minibatches
from megappo.trainer.pair_replay import PairReplay
from megappo.trainer.replay import NoReplay, Replay
from megappo.workers.actor import ActorWorker
from megappo.workers.critic import CriticWorker, NoCritic
from megappo.workers.reference import NoReference, ReferenceWorker
from megappo.workers.shaping import RewardShaping


@dataclass(frozen=True)
class PPOTrainer:
    """The PPO loop on the ranks of one training layout; every rank runs the same calls on its part of the batch."""

    mesh: Mesh
    plan: BatchPlan
    collector: Collector | GroupFilter
    shaping: RewardShaping
    balance: Balance | NoBalance
    actor: ActorWorker
    critic: CriticWorker | NoCritic
    reference: ReferenceWorker | NoReference
    advantages: AdvantagePhase
    replay: Replay | PairReplay | NoReplay
    loop: Loop
    seed: int
    max_response_length: int

    def fit(self) -> ExitCode:
        """Trains until the last step, or until a signal asks to stop."""
        for step in self.loop.steps():
            collected = self.collector.collect(step)
            if collected is None:  # a signal asks to stop
                continue
            samples, scored = collected
            batch = self.balance.deal(self.shaping.batch(samples, scored), step)
            step.record(self.shaping.metrics())
            with step.phase("old_log_probs"):
                batch = self.actor.fill_old_log_probs(batch)
                step.record(self.actor.rollout_metrics())
            with step.phase("ref_log_probs"):
                batch = self.reference.fill_log_probs(batch)
            with step.phase("values"):
                batch = self.critic.fill_values(batch)
            with step.phase("advantages"):
                fresh = self.advantages.fill(batch)
                batch = self.replay.mix(fresh, step)
                taken_off = self.advantages.taken_off(fresh)
                step.record(experience_metrics(fresh, scored.batch, taken_off, self.mesh, self.max_response_length))
                step.record(self.advantages.update_coefficient(fresh))
            with step.phase("update_critic"):
                for minibatch in minibatches(batch, self.plan.critic, seed=self.seed, step=step.number):
                    step.record_update(self.critic.update(minibatch))
            with step.phase("update_actor"):
                planned = minibatches(batch, self.plan.actor, seed=self.seed, step=step.number)
                for minibatch in self.actor.within_limit(planned):
                    step.record_update(self.actor.update(minibatch))
            step.finish(global_tokens(batch, self.mesh))
            self.loop.keep_samples(step.number, samples, scored)
        return self.loop.outcome

    def close(self) -> None:
        """Ends reward processes and the engine, after everything else that communicates."""
        self.loop.close()
