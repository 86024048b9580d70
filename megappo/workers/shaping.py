"""From what the reward parts said to the scores of a step's batch: normalisation, clipping, the over-long penalty.

Evaluations don't come here: they report scores as the parts gave them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from megappo.algorithms.masked import SumOverRanks
from megappo.algorithms.running import STD_EPS, RunningMoments
from megappo.config.reward import RewardConfig
from megappo.experience.batch import ExperienceBatch
from megappo.experience.sample import GreedyScore, RolloutSample
from megappo.workers.reward import ScoredSamples


class RewardShaping:
    """Shapes sequence scores in this order: normalise, clip, take the penalty off. Rewards of tokens stay as they are.
    Greedy responses, which samples are compared with, are shaped alike and have no part in moments and metrics.

    `sum_over_ranks` adds up over data-parallel ranks, `max_response_length` is where the penalty is whole. A
    `SavedFile` of checkpoints: the moments of the run so far.
    """

    def __init__(self, config: RewardConfig, sum_over_ranks: SumOverRanks, max_response_length: int) -> None:
        self._config = config
        self._over_ranks = sum_over_ranks
        self._max_response_length = max_response_length
        self._moments = RunningMoments()
        self._penalties = torch.zeros(0, dtype=torch.float64)

    def batch(
        self, samples: Sequence[RolloutSample], scored: ScoredSamples, *, is_fresh: bool = True
    ) -> ExperienceBatch:
        """The batch of a step's samples with `scores` and `token_scores`. A collective call over dp ranks.

        Samples that the policy did not make now are not `is_fresh`: they leave the moments and metrics as they are, and
        the call is no collective one.
        """
        scores = torch.tensor(scored.batch.scores, dtype=torch.float64)
        penalties = self._overlong(torch.tensor([len(sample.response_ids) for sample in samples], dtype=torch.float64))
        if is_fresh:
            self._penalties = penalties
            if self._config.normalize != "none":
                self._moments.update(scores, self._over_ranks)
        batch = ExperienceBatch.from_samples(samples)
        greedy = [sample.greedy for sample in samples if sample.greedy is not None]
        if greedy:
            assert len(greedy) == len(samples), "all samples of a step are compared with a greedy response, or none"
            batch = batch.fill(baseline_scores=self._rewards_of(greedy).float())
        shaped = self._scaled(scores) - penalties
        return batch.fill(scores=shaped.float(), token_scores=token_scores(samples, scored))

    def metrics(self) -> dict[str, float]:
        """What the last batch's scores were shaped with. A collective call over data-parallel ranks."""
        metrics: dict[str, float] = {}
        if self._config.normalize != "none":
            metrics |= {"reward/running_mean": self._moments.mean, "reward/running_std": self._moments.std}
        if self._config.overlong_buffer.enable:
            local = torch.stack([self._penalties.sum(), torch.tensor(len(self._penalties), dtype=torch.float64)])
            total, count = self._over_ranks(local).tolist()
            metrics["reward/overlong_penalty"] = total / max(count, 1.0)
        return metrics

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self._moments.state_dict()))

    def load(self, path: Path) -> None:
        self._moments.load_state_dict(json.loads(path.read_text()))

    def _scaled(self, scores: Tensor) -> Tensor:
        """Normalised by the moments of all steps so far, this one included (not where they have no spread), and
        clipped."""
        if self._config.normalize == "standard":
            scores = scores - self._moments.mean
        if self._config.normalize != "none" and self._moments.std > 0:
            scores = scores / (self._moments.std + STD_EPS)
        return scores if self._config.clip_range is None else scores.clamp(*self._config.clip_range)

    def _rewards_of(self, greedy: Sequence[GreedyScore]) -> Tensor:
        """[greedy] float64: R of each as a sample would have it, the sum of its token rewards; 0 without tokens."""
        scores, tokens, lengths = (
            torch.tensor(column, dtype=torch.float64)
            for column in zip(*((one.score, one.token_score, one.length) for one in greedy), strict=True)
        )
        return torch.where(lengths > 0, self._scaled(scores) - self._overlong(lengths) + tokens, 0.0)

    def _overlong(self, lengths: Tensor) -> Tensor:
        """[B] float64, as `lengths`: 0 up to the buffer, then rising evenly to `penalty_factor` at the limit."""
        buffer = self._config.overlong_buffer
        if not buffer.enable:
            return torch.zeros(len(lengths), dtype=torch.float64)
        inside = (lengths - (self._max_response_length - buffer.len)).clamp(min=0)
        return buffer.penalty_factor * inside / buffer.len


def token_scores(samples: Sequence[RolloutSample], scored: ScoredSamples) -> Tensor:
    """[tokens] float32: the rewards of single response tokens at their tokens, 0 everywhere else."""
    rows = scored.batch.token_scores or [None] * len(samples)
    flat: list[float] = []
    for sample, values in zip(samples, rows, strict=True):
        flat += [0.0] * len(sample.prompt.token_ids)
        flat += values if values is not None else [0.0] * len(sample.response_ids)
    return torch.tensor(flat, dtype=torch.float32)
