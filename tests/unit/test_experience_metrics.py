"""Metrics of a step's rewards against hand arithmetic, on one rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.algorithms.kl import KLController
from megappo.algorithms.masked import one_rank
from megappo.config.algorithm import AlgorithmConfig
from megappo.config.reward import RewardConfig
from megappo.config.rollout import EvaluationSampling
from megappo.experience.batch import ExperienceBatch
from megappo.experience.replay import stored
from megappo.experience.sample import Prompt, RolloutSample
from megappo.rewards.build import build_reward
from megappo.rewards.reward import Reward, ScoredBatch
from megappo.trainer.advantages import AdvantagePhase
from megappo.trainer.collect import Collected, group_values
from megappo.trainer.evaluate import Evaluator
from megappo.trainer.experience_metrics import experience_metrics, sequence_sums
from megappo.workers.reward import ScoredSamples
from megappo.workers.shaping import RewardShaping

NAN = float("nan")
SCORES = [1.0, 1.0, 1.0, 0.0]
BETA = 0.5


def phase_of(mesh: Any, **algorithm: Any) -> AdvantagePhase:
    controller = KLController("fixed", kl_coef=BETA, target_kl=0.1, horizon=10)
    config = AlgorithmConfig(adv_estimator="grpo", **algorithm)
    return AdvantagePhase(config, controller, mesh, num_prompts=2, num_samples=2)


def metrics(batch: ExperienceBatch, **algorithm: Any) -> dict[str, float]:
    """Of a step of two prompts with two responses each."""
    mesh: Any = SimpleNamespace(dp_group=SimpleNamespace(size=lambda: 1), device=torch.device("cpu"), dp_rank=0)
    phase = phase_of(mesh, **algorithm)
    filled = phase.fill(batch)
    scored = ScoredBatch(SCORES, {"part": SCORES}, [{} for _ in SCORES], [])
    return experience_metrics(filled, scored, phase.taken_off(filled), mesh, max_response_length=8)


def step() -> ExperienceBatch:
    """Prompts of one token, responses of 2, 3 (the middle token an environment's), 1 and 0 tokens; the policy's tokens
    have log-prob -1 and -3 by the reference, an exact KL of 4, and a tenth of a reward each."""
    batch = ExperienceBatch.from_sequences([[5] * 3, [5] * 4, [5] * 2, [5]], [1] * 4, positions=range(4))
    batch.response_mask[5] = False
    mask = batch.response_mask
    values = [torch.where(mask, value, NAN) for value in (-1.0, -3.0, 4.0, 0.1)]
    filled = dict(zip(("old_log_probs", "ref_log_probs", "ref_kl", "token_scores"), values, strict=True))
    return batch.fill(scores=torch.tensor(SCORES), **filled)


@pytest.mark.parametrize("normalize_scores", [False, True])
@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({}, 0.0),
        # β · KL is 1 a token of the policy's, of which the sequences have 2, 2, 1 and 0; with k3 ½ (1 + e⁻²).
        ({"use_kl_in_reward": True}, 5 / 4),
        ({"use_kl_in_reward": True, "kl_penalty": "k3"}, 0.5676676416 * 5 / 4),
        ({"use_kl_in_reward": True, "kl_penalty": "full"}, 2.0 * 5 / 4),
    ],
    ids=["none", "k1", "k3", "exact"],
)
def test_the_penalty_is_reported_whatever_becomes_of_the_scores(
    algorithm: dict[str, Any], expected: float, normalize_scores: bool
) -> None:
    found = metrics(step(), normalize_scores=normalize_scores, **algorithm)
    assert found["reward/kl_penalty"] == pytest.approx(expected, abs=1e-6)
    assert found["reward/score"] == pytest.approx((3 + 0.5) / 4)
    # The three responses with tokens have one score, which less its mean is 0.
    scores = 0.0 if normalize_scores else 3.0
    assert found["reward/token_reward"] == pytest.approx((scores + 0.5) / 4 - expected, abs=1e-6)


def answered(position: int, mask: tuple[bool, ...]) -> RolloutSample:
    """A response whose tokens are the policy's where `mask` is true."""
    prompt = Prompt(0, "made", (7,), "")
    size = len(mask)
    return RolloutSample(prompt, position, position % 2, (5,) * size, (0.0,) * size, "", "stop", mask=mask)


def test_a_sequence_is_worth_the_same_in_all_that_asks() -> None:
    """A part of weight 2 gives a score and rewards of tokens; those of an environment's, the tens, count nowhere. So
    the first two responses, to one prompt, are worth 2 · (1 + 0.5 + 0.25) and 2 · (1.5 + 0.25), which is the same."""
    masks = [(True, False, True), (True, False, True), (True, True), (False, True)]
    samples = [answered(position, mask) for position, mask in enumerate(masks)]
    given = [(1.0, (0.5, 10.0, 0.25)), (1.5, (0.0, 20.0, 0.25)), (0.0, (0.5, 0.5)), (-1.0, (30.0, 2.0))]
    worth = [3.5, 3.5, 2.0, 2.0]
    part = {"name": "made", "kind": "implicit", "policy": "policy", "weight": 2.0}
    config = RewardConfig.model_validate({"parts": (part,)})
    outcomes = [Reward(score, token_scores=tokens) for score, tokens in given]
    scored = ScoredSamples(build_reward(config).score(samples, models={"made": outcomes}), None)
    assert scored.batch.totals == worth
    assert scored.batch.parts == {"made": [value / 2 for value in worth]}
    mesh: Any = SimpleNamespace(dp_group=SimpleNamespace(size=lambda: 1), device=torch.device("cpu"), dp_rank=0, dp=1)
    assert group_values(Collected(samples, scored), "score", 2, mesh) == [worth[:2], worth[2:]]
    assert group_values(Collected(samples, scored), "made", 2, mesh) == [[1.75, 1.75], [1.0, 1.0]]
    measured = Evaluator(mesh, {}, None, None, EvaluationSampling(n=2), None)._summary(samples, scored, 2)  # type: ignore[arg-type]
    assert measured["reward"] == sum(worth) / 4
    batch = RewardShaping(config, one_rank, 4).batch(samples, scored)
    filled = phase_of(mesh).fill(batch.fill(old_log_probs=batch.rollout_log_probs))
    assert sequence_sums(filled, filled.get("token_rewards")).tolist() == worth  # what estimators compare
    assert filled.get("advantages").tolist() == pytest.approx([0.0] * filled.num_tokens)
    found = experience_metrics(filled, scored.batch, torch.zeros(filled.num_tokens), mesh, max_response_length=4)
    assert (found["reward/score"], found["reward/parts/made"]) == (sum(worth) / 4, sum(worth) / 8)
    assert [row.score for _, row in stored(filled, 1, lambda position: position)] == worth


def test_scores_with_mean_0_are_no_penalty() -> None:
    batch = ExperienceBatch.from_sequences([[5] * 3] * 4, [1] * 4, positions=range(4))
    batch = batch.fill(scores=torch.tensor(SCORES), old_log_probs=torch.zeros(12))
    found = metrics(batch, normalize_scores=True)
    assert (found["reward/score"], found["reward/kl_penalty"]) == (0.75, 0.0)
    assert found["reward/token_reward"] == pytest.approx(0.0, abs=1e-6)
