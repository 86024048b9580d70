"""ReMax against hand arithmetic: a response that is the greedy one has no advantage, whatever its reward is made of."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.algorithms.kl import KLController
from megappo.algorithms.masked import one_rank
from megappo.config.algorithm import AlgorithmConfig
from megappo.config.reward import RewardConfig
from megappo.experience.sample import Prompt, RolloutSample
from megappo.rewards.build import build_reward
from megappo.rewards.reward import Reward
from megappo.trainer.advantages import AdvantagePhase
from megappo.trainer.baseline import GreedyBaseline
from megappo.workers.reward import ScoredSamples
from megappo.workers.shaping import RewardShaping

MESH: Any = SimpleNamespace(dp_group=SimpleNamespace(size=lambda: 1), device=torch.device("cpu"))
LIMIT = 6
PARTS = ({"name": "made", "kind": "exact_match"},)


class Made:
    """Stands for a reward worker: a score for the first token, and where asked half of each token as its reward."""

    def __init__(self, of_tokens: bool) -> None:
        self._of_tokens = of_tokens
        part = {"name": "made", "kind": "implicit", "policy": "policy"}
        self._scorer = build_reward(RewardConfig.model_validate({"parts": (part,)}))

    def score(self, samples: Sequence[RolloutSample]) -> ScoredSamples:
        found = [
            Reward(
                float(sample.response_ids[0]),
                token_scores=tuple(0.5 * token for token in sample.response_ids) if self._of_tokens else None,
            )
            for sample in samples
        ]
        return ScoredSamples(self._scorer.score(samples, models={"made": found}), None)


def response(position: int, *ids: int, mask: tuple[bool, ...] | None = None) -> RolloutSample:
    prompt = Prompt(0, "made", (7, 8), "")
    return RolloutSample(prompt, position, position % 2, ids, (0.0,) * len(ids), "", "stop", mask)


def advantages(
    samples: list[RolloutSample], greedy: list[RolloutSample], *, of_tokens: bool = False, **settings: object
) -> list[float]:
    """One a sample: the advantage at its last token."""
    reward: Any = Made(of_tokens)
    compared = GreedyBaseline(None, reward, MESH, num_samples=2).compare(samples, greedy, len(greedy))  # type: ignore[arg-type]
    shaping = RewardShaping(RewardConfig.model_validate({"parts": PARTS} | settings), one_rank, LIMIT)
    batch = shaping.batch(compared, reward.score(compared))
    config = AlgorithmConfig(adv_estimator="remax")
    controller = KLController("fixed", kl_coef=0.0, target_kl=0.1, horizon=10)
    filled = AdvantagePhase(config, controller, MESH, len(greedy), 2).fill(batch)
    return filled.get("advantages")[filled.cu_seqlens[1:] - 1].tolist()


# Of prompt 0 the first sample is the greedy response, of prompt 1 the second one.
SAMPLES = [response(0, 3, 4, 5), response(1, 2, 2), response(2, 1), response(3, 4, 0, 0, 0, 2)]
GREEDY = [response(0, 3, 4, 5), response(1, 4, 0, 0, 0, 2)]


def test_scores_alone() -> None:
    assert advantages(SAMPLES, GREEDY) == [0, 2 - 3, 1 - 4, 0]


def test_rewards_of_tokens() -> None:
    """The four responses are worth 3 + 6, 2 + 2, 1 + ½ and 4 + 3."""
    assert advantages(SAMPLES, GREEDY, of_tokens=True) == [0, 4 - 9, 1.5 - 7, 0]


def test_rewards_of_an_environments_tokens_count_in_neither() -> None:
    """With the middle token an environment's, 3 4 5 is worth 3 + 4, and 2 2 still 2 + 2."""
    greedy = response(0, 3, 4, 5, mask=(True, False, True))
    assert advantages([greedy, response(1, 2, 2)], [greedy], of_tokens=True) == [0, 4 - 7]


def test_penalties_for_length() -> None:
    """From 2 tokens on a quarter for each: the four responses are worth 3 − ¼, 2, 1 and 4 − ¾."""
    buffer = {"enable": True, "len": 4, "penalty_factor": 1.0}
    assert advantages(SAMPLES, GREEDY, overlong_buffer=buffer) == [0, 2 - 2.75, 1 - 3.25, 0]


def test_everything_at_once() -> None:
    """Scores 3 2 1 4 have mean 5/2 and variance 5/3; tokens' rewards are not scaled."""
    std = (5 / 3) ** 0.5
    buffer = {"enable": True, "len": 4, "penalty_factor": 1.0}
    worth = [0.5 / std - 0.25 + 6, -0.5 / std + 2, -1.5 / std + 0.5, 1.5 / std - 0.75 + 3]
    found = advantages(SAMPLES, GREEDY, of_tokens=True, normalize="standard", overlong_buffer=buffer)
    assert found == pytest.approx([0, worth[1] - worth[0], worth[2] - worth[3], 0], abs=1e-6)
