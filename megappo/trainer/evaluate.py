"""Evaluation: held-out prompts, sampled and scored, each data set by its own name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

import torch

from megappo.config.rollout import EvaluationSampling
from megappo.engines.rollout import Progress, SamplingParams
from megappo.experience.sample import Prompt, RolloutSample
from megappo.parallel.collectives import sum_over
from megappo.parallel.mesh import Mesh
from megappo.workers.reward import RewardWorker, ScoredSamples
from megappo.workers.reward_sets import SetRewards
from megappo.workers.rollout import RolloutWorker

# Keeps the noise of evaluations apart from that of training steps, whose streams have one number.
EVALUATION_STREAM = 0x65766C


@dataclass(frozen=True)
class Evaluator:
    """Scores the policy of the moment on held-out prompts; every rank takes every dp-th prompt."""

    mesh: Mesh
    sets: Mapping[str, Sequence[Prompt]]
    rollout: RolloutWorker
    reward: RewardWorker | SetRewards
    config: EvaluationSampling
    sampling: SamplingParams

    def run(self, progress: Progress | None = None) -> dict[str, float]:
        """`eval/<set>/{reward,response_length}` and, where rule rewards say what is right, `exact_match` and
        `pass_at_k`.

        `exact_match` is the share of responses that are right, `pass_at_k` the share of prompts with a right one among
        their n responses (k = n), `pass_at_<k>` the estimate for the smaller k of `pass_at`. Takes the turn to generate
        and gives it back. A collective call; the same values on
        every rank.
        """
        self.rollout.sync_weights()
        responses = [self._sample(prompts, index, progress) for index, prompts in enumerate(self.sets.values())]
        self.rollout.release()
        metrics: dict[str, float] = {}
        for (name, prompts), samples in zip(self.sets.items(), responses, strict=True):
            reward = self.reward.held_out(name) if isinstance(self.reward, SetRewards) else self.reward
            summary = self._summary(samples, reward.score(samples), len(prompts))
            metrics |= {f"eval/{name}/{key}": value for key, value in summary.items()}
        return metrics

    def close(self) -> None:
        """Ends the reward processes and, last, the engine."""
        self.reward.close()
        self.rollout.close()

    def _sample(self, prompts: Sequence[Prompt], index: int, progress: Progress | None) -> list[RolloutSample]:
        n = self.config.n
        mine = range(self.mesh.dp_rank, len(prompts), self.mesh.dp)
        positions = [prompt * n + sample for prompt in mine for sample in range(n)]
        return self.rollout.sample(prompts, positions, self.sampling, n, (EVALUATION_STREAM, index), progress)

    def _summary(self, samples: list[RolloutSample], scored: ScoredSamples, num_prompts: int) -> dict[str, float]:
        n = self.config.n
        right = scored.right
        counts = [] if right is None else [sum(right[start : start + n]) for start in range(0, len(right), n)]
        local = [
            sum(scored.batch.totals),
            sum(sample.num_policy_tokens for sample in samples),
            sum(counts),
            *(sum(pass_at_k(n, count, k) for count in counts) for k in (n, *self.config.pass_at)),
        ]
        sums = sum_over(self.mesh.dp_group, self.mesh.device)(torch.tensor(local, dtype=torch.float64)).tolist()
        reward, length, correct, passed, *passed_at = sums
        summary = {"reward": reward / (num_prompts * n), "response_length": length / (num_prompts * n)}
        if right is not None:
            summary |= {"exact_match": correct / (num_prompts * n), "pass_at_k": passed / num_prompts}
            found = zip(self.config.pass_at, passed_at, strict=True)
            summary |= {f"pass_at_{k}": solved / num_prompts for k, solved in found}
        return summary


def pass_at_k(n: int, num_right: int, k: int) -> float:
    """Chance that k of n responses, drawn without replacement, hold one of the `num_right`: 1 − C(n − c, k) / C(n, k).

    The unbiased estimate of pass@k (arXiv 2107.03374, eq. 1).
    """
    return 1.0 - comb(n - num_right, k) / comb(n, k)


def evaluation_sampling(config: EvaluationSampling, training: SamplingParams) -> SamplingParams:
    """The sampling of an evaluation: its own temperature and truncation, the training's stop conditions and lengths."""
    return SamplingParams(
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        max_tokens=training.max_tokens,
        stop=training.stop,
        stop_token_ids=training.stop_token_ids,
        ignore_eos=training.ignore_eos,
    )
