"""The baseline of ReMax, rewards of greedy responses, generated in the same turn as the sampled ones; or none."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megappo.experience.sample import GreedyScore, Prompt, RolloutSample
from megappo.parallel.collectives import sum_over
from megappo.parallel.mesh import Mesh
from megappo.workers.reward import RewardWorker
from megappo.workers.reward_sets import SetRewards
from megappo.workers.rollout import RolloutWorker

# Keeps these responses apart from those of training steps; greedy ones draw no noise, but every request has a key.
BASELINE_STREAM = 0x6261736C


@dataclass(frozen=True)
class GreedyBaseline:
    """One greedy response to each prompt of a batch, generated and scored by the rank that has the prompt's first
    sample. Every method is a collective call over the world."""

    rollout: RolloutWorker
    reward: RewardWorker | SetRewards
    mesh: Mesh
    num_samples: int

    def generate(self, prompts: Sequence[Prompt], positions: Sequence[int], step: int) -> list[RolloutSample]:
        """Responses to the prompts whose first sample is at one of this rank's `positions`."""
        greedy = dataclasses.replace(self.rollout.sampling, temperature=0.0, top_k=0, top_p=1.0)
        mine = [position // self.num_samples for position in positions if position % self.num_samples == 0]
        return self.rollout.sample(prompts, mine, greedy, 1, (BASELINE_STREAM, step))

    def compare(
        self, samples: Sequence[RolloutSample], greedy: Sequence[RolloutSample], num_prompts: int
    ) -> list[RolloutSample]:
        """The samples with `greedy`, also where another rank has the greedy response to their prompt."""
        local = torch.zeros(num_prompts, 3, dtype=torch.float64)
        scored = self.reward.score(greedy).batch
        token_rows = scored.token_scores or [None] * len(greedy)
        for sample, score, tokens in zip(greedy, scored.scores, token_rows, strict=True):
            row = [score, sum(tokens or ()), len(sample.response_ids)]
            local[sample.position] = torch.tensor(row, dtype=torch.float64)
        rows = sum_over(self.mesh.dp_group, self.mesh.device)(local).tolist()
        found = [GreedyScore(score, token_score, int(length)) for score, token_score, length in rows]
        return [dataclasses.replace(sample, greedy=found[sample.position // self.num_samples]) for sample in samples]


class NoBaseline:
    """Stands where the advantage estimator compares with no greedy response: generates nothing, changes nothing."""

    def generate(self, prompts: Sequence[Prompt], positions: Sequence[int], step: int) -> list[RolloutSample]:
        return []

    def compare(
        self, samples: Sequence[RolloutSample], greedy: Sequence[RolloutSample], num_prompts: int
    ) -> list[RolloutSample]:
        return list(samples)
