"""The reward that a policy trained on preferences implies, token by token: reinforced token optimization
(arXiv 2404.18922).

The policy itself comes from `trainer/dpo.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.engines.training import ModelEngine
from megappo.experience.batch import ExperienceBatch
from megappo.experience.sample import Prompt, RolloutSample
from megappo.parallel.collectives import max_over
from megappo.rewards.reward import FailedReward, Reward
from megappo.workers.cutting import Cutter
from megappo.workers.policy import LogProbs

PLACEHOLDER = RolloutSample(Prompt(0, "", (0,), ""), 0, 0, (), (), "", "stop")
"""In the place of samples that other ranks have more."""


@dataclass(frozen=True)
class ImplicitReward:
    """β · (log π_policy − log π_reference) of each response token, of two frozen policies with the actor's tokenizer.

    `part` is its name in `reward.parts`. Log-probs are at temperature 1, as DPO trained them. With `at_end` the sum
    over the response is its score, which lands on the last response token.
    """

    part: str
    policy: ModelEngine
    reference: ModelEngine
    log_probs: LogProbs
    beta: float
    at_end: bool
    cut: Cutter

    def score(self, samples: Sequence[RolloutSample]) -> list[Reward | FailedReward]:
        """One outcome a sample, the same on every rank of the model. A collective call over the world.

        A token that an environment put in has no reward, a response without tokens has 0.
        """
        outcomes: list[Reward | FailedReward] = []
        for index, values in enumerate(self._token_rewards(samples)):
            total = sum(values)
            if not math.isfinite(total):
                outcomes.append(FailedReward(index, self.part, f"the implicit reward of the response is {total}"))
            else:
                outcomes.append(Reward(total) if self.at_end else Reward(0.0, token_scores=values))
        return outcomes

    def _token_rewards(self, samples: Sequence[RolloutSample]) -> list[tuple[float, ...]]:
        """Rewards of each sample's response tokens."""
        mesh = self.policy.mesh
        # As many forward passes on every data-parallel rank: experts exchange tokens between them.
        most = int(max_over(mesh.dp_group, mesh.device)(torch.tensor([len(samples)], dtype=torch.int64))[0])
        if most == 0:
            return []
        rows = [*samples, *[PLACEHOLDER] * (most - len(samples))]
        batch = ExperienceBatch.from_samples(rows)
        rewards = self.beta * (self._log_probs_of(self.policy, batch) - self._log_probs_of(self.reference, batch))
        starts = batch.cu_seqlens.tolist()
        return [
            tuple(rewards[start + len(sample.prompt.token_ids) : stop].tolist())
            for sample, start, stop in zip(samples, starts, starts[1:], strict=False)
        ]

    def _log_probs_of(self, engine: ModelEngine, batch: ExperienceBatch) -> Tensor:
        """[tokens] float64, 0 outside of the responses."""
        cut = self.cut(batch)
        return cut.restored(engine.per_token(cut.micros, self.log_probs)).double()
