"""Preference pairs as off-policy experience: their responses take the places of some fresh ones in training.

Sequences of earlier steps are replayed by `replay.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch

from megappo.config.replay import ReplayConfig
from megappo.data.preferences import PreferencePair
from megappo.experience.batch import ExperienceBatch
from megappo.experience.replay import joined, multinomial, replaced_places
from megappo.experience.sample import RolloutSample
from megappo.parallel.collectives import gather_objects, sum_over
from megappo.parallel.mesh import Mesh
from megappo.trainer.advantages import AdvantagePhase
from megappo.trainer.loop import Step
from megappo.workers.actor import ActorWorker
from megappo.workers.critic import CriticWorker, NoCritic
from megappo.workers.pairs import summed
from megappo.workers.reference import NoReference, ReferenceWorker
from megappo.workers.reward import RewardWorker
from megappo.workers.reward_sets import SetRewards
from megappo.workers.shaping import RewardShaping


def offline_samples(pairs: Sequence[PreferencePair], eos_ids: Sequence[int]) -> list[RolloutSample]:
    """The chosen and the rejected response of each pair in turn, with log-probs of 0."""
    return [
        RolloutSample(
            pair.prompt, 2 * number + place, place, ids, (0.0,) * len(ids), text,
            "stop" if ids and ids[-1] in eos_ids else "length",
        )
        for number, pair in enumerate(pairs)
        for place, (ids, text) in enumerate(((pair.chosen_ids, pair.chosen), (pair.rejected_ids, pair.rejected)))
    ]  # fmt: skip


def with_log_probs(samples: Sequence[RolloutSample], actor: ActorWorker, mesh: Mesh) -> list[RolloutSample]:
    """The samples with the log-probs that the actor of this moment gives them, before it is trained or resumed: the
    starting policy's, against which the importance ratio of every later step is taken. A collective call."""
    # Every data-parallel rank takes as many, for experts exchange tokens between them: the last ones may come twice.
    rounds = range(-(-len(samples) // mesh.dp))
    mine = [(mesh.dp_rank + number * mesh.dp) % len(samples) for number in rounds]
    batch = ExperienceBatch.from_samples([samples[index] for index in mine])
    log_probs = actor.log_probs_now(batch)
    ends = batch.cu_seqlens[1:].tolist()
    own = {
        index: tuple(log_probs[end - len(samples[index].response_ids) : end].tolist())
        for index, end in zip(mine, ends, strict=True)
    }
    known = {index: values for part in gather_objects(own, mesh.dp_group) for index, values in part.items()}
    return [dataclasses.replace(sample, rollout_log_probs=known[index]) for index, sample in enumerate(samples)]


@dataclass(frozen=True)
class PairReplay:
    """Trains on a mixture of fresh sequences and responses of pairs; advantages are those of the mixture.

    The pairs' old log-probs are those of `with_log_probs`, their rewards those of the same parts as the fresh ones'.
    Draws follow from (seed, step) alone, so that there is nothing to save.
    """

    samples: Sequence[RolloutSample]
    config: ReplayConfig
    mesh: Mesh
    reward: RewardWorker | SetRewards
    shaping: RewardShaping
    reference: ReferenceWorker | NoReference
    critic: CriticWorker | NoCritic
    advantages: AdvantagePhase
    num_sequences: int
    seed: int

    def mix(self, fresh: ExperienceBatch, step: Step) -> ExperienceBatch:
        """The batch to train on, as large as `fresh`. A collective call."""
        drawn = self.draw(step.number)
        positions = fresh.positions.tolist()
        samples = [
            dataclasses.replace(self.samples[drawn[position]], position=position)
            for position in positions
            if position in drawn
        ]
        scored = self.reward.score(samples)
        rows = {position: fresh.rows(index, index + 1) for index, position in enumerate(positions)}
        total = 0.0
        if samples:
            offline = self.shaping.batch(samples, scored, is_fresh=False)
            offline = offline.fill(old_log_probs=offline.rollout_log_probs)
            total = float(offline.get("scores").sum() + summed(offline, offline.get("token_scores")).sum())
            rows |= {sample.position: offline.rows(index, index + 1) for index, sample in enumerate(samples)}
        over_ranks = sum_over(self.mesh.dp_group, self.mesh.device)
        step.record(
            {
                "replay/size": float(len(self.samples)),
                "replay/drawn": float(len(drawn)),
                "replay/distinct": float(len(set(drawn.values()))),
                "replay/reward": float(over_ranks(torch.tensor([total], dtype=torch.float64))[0]) / max(len(drawn), 1),
            }
        )
        if not drawn:
            return fresh
        # Reference and critic see all rows again, not the drawn ones alone: experts that data-parallel ranks share need
        # as many forward passes on each of them.
        mixed = joined([rows[position] for position in positions])
        return self.advantages.fill(self.critic.fill_values(self.reference.fill_log_probs(mixed)))

    def draw(self, step: int) -> dict[int, int]:
        """Position in the step → number of the sample that stands there, for all ranks."""
        places = replaced_places(range(self.num_sequences), self.config.fraction)
        numbers = multinomial(numpy.ones(len(self.samples)), len(places), self.seed, step)
        return dict(zip(places, numbers, strict=True))
