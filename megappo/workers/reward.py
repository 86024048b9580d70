"""The reward worker: one rank of a model-parallel group scores its samples, the others hear the scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from megappo.config.reward import RULES, RewardConfig
from megappo.errors import RewardError
from megappo.experience.sample import RolloutSample
from megappo.parallel.collectives import broadcast_object, gather_objects, sum_over
from megappo.parallel.mesh import Mesh
from megappo.rewards.build import RewardScorer, TooManyFailed, build_reward
from megappo.rewards.reward import FailedReward, Reward, ScoredBatch


@dataclass(frozen=True)
class ScoredSamples:
    """The scores of this rank's samples, in their order; `right` tells which satisfy every rule (None without a
    rule)."""

    batch: ScoredBatch
    right: list[bool] | None


class ScoringModel(Protocol):
    """A part of the reward that is computed on the model's ranks."""

    def score(self, samples: Sequence[RolloutSample]) -> list[Reward | FailedReward]:
        """One outcome a sample, the same on every rank of the model. A collective call over the world."""
        ...


class RewardWorker:
    """Scores on the first rank of each model-parallel group, so that no judge is asked twice and no two ranks differ;
    reward models score on all of their ranks.

    Imports the reward functions when built, on every rank, so that a wrong name fails at once everywhere. `models` has
    the model of each part of the kinds `model` and `implicit`, by the part's name.
    """

    def __init__(self, config: RewardConfig, mesh: Mesh, models: Mapping[str, ScoringModel] | None = None) -> None:
        self._mesh = mesh
        self._models = dict(models or {})
        self._rules = [part.name for part in config.parts if part.kind in RULES]
        self._scorer: RewardScorer = build_reward(config)
        self._in_training = self
        if 0 < len(config.training_parts) < len(config.parts):
            learned = config.model_copy(update={"parts": config.training_parts})
            names = [part.name for part in learned.parts]
            known = {name: model for name, model in self._models.items() if name in names}
            self._in_training = RewardWorker(learned, mesh, known)

    def score(self, samples: Sequence[RolloutSample]) -> ScoredSamples:
        """Raises RewardError on every rank where too many samples of the step fail."""
        by_model = {name: model.score(samples) for name, model in self._models.items()}
        is_leader = self._mesh.is_group_leader
        here: ScoredBatch | RewardError | None = self._score_here(samples, by_model) if is_leader else None
        outcome = broadcast_object(here, self._mesh.sequence_group, self._mesh.group_leader)
        if isinstance(outcome, RewardError):
            raise outcome
        assert isinstance(outcome, ScoredBatch), "the leader of a model-parallel group scores or says why not"
        return ScoredSamples(outcome, self._right(outcome))

    def begin(self, sample: RolloutSample) -> None:
        """Starts the slow parts of a sample that is complete while others are still generated. No collective call."""
        if self._mesh.is_group_leader:
            self._scorer.begin(sample)

    def in_training(self) -> RewardWorker:
        """The worker that training learns from: without the parts that only measure held-out prompts."""
        return self._in_training

    def close(self) -> None:
        """Ends the reward processes."""
        self._scorer.close()
        if self._in_training is not self:
            self._in_training.close()

    def _score_here(
        self, samples: Sequence[RolloutSample], by_model: Mapping[str, Sequence[Reward | FailedReward]]
    ) -> ScoredBatch | RewardError:
        try:
            return self._scorer.score(samples, self._sum_counts, by_model)
        except TooManyFailed as error:
            # All leaders stop together, and any of them may be the one whose error is shown.
            firsts = gather_objects(error.first, self._mesh.dp_group)
            return error.told_by_all(next((first for first in firsts if first is not None), None))
        except RewardError as error:
            return error

    def _sum_counts(self, counts: list[int]) -> list[int]:
        """Over the leaders of all replicas: they are the data-parallel group of a leader."""
        local = torch.tensor(counts, dtype=torch.float64)
        return [int(count) for count in sum_over(self._mesh.dp_group, self._mesh.device)(local)]

    def _right(self, scored: ScoredBatch) -> list[bool] | None:
        if not self._rules:
            return None
        return [
            all(score == 1.0 for score in scores) for scores in zip(*map(scored.parts.get, self._rules), strict=True)
        ]
