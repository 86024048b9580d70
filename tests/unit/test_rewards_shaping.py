"""From parts to the scores of a batch: moments over the run, clipping, the over-long penalty, rewards of tokens."""

import json
from pathlib import Path

import numpy
import pytest
import torch

from megappo.algorithms.masked import one_rank
from megappo.algorithms.running import RunningMoments
from megappo.config.reward import RewardConfig
from megappo.experience.batch import ExperienceBatch
from megappo.experience.sample import GreedyScore, Prompt, RolloutSample
from megappo.rewards.function import as_reward
from megappo.rewards.reward import Reward, ScoredBatch
from megappo.workers.reward import ScoredSamples
from megappo.workers.shaping import RewardShaping

PARTS = ({"name": "one", "kind": "exact_match"},)


def shaping(limit: int = 10, **settings: object) -> RewardShaping:
    return RewardShaping(RewardConfig.model_validate({"parts": PARTS} | settings), one_rank, limit)


def sample(length: int, position: int = 0, greedy: GreedyScore | None = None) -> RolloutSample:
    prompt = Prompt(0, "made", (7, 8), "")
    ids = tuple(range(10, 10 + length))
    return RolloutSample(prompt, position, 0, ids, (0.0,) * length, "", "stop", greedy=greedy)


def batch(shaped: RewardShaping, scores: list[float], lengths: list[int] | None = None) -> ExperienceBatch:
    samples = [sample(length, place) for place, length in enumerate(lengths or [1] * len(scores))]
    return shaped.batch(samples, ScoredSamples(ScoredBatch(scores, {}, [{}] * len(scores), []), None))


def scores_of(made: ExperienceBatch) -> list[float]:
    return made.get("scores").tolist()


def test_scores_are_left_alone_unless_asked() -> None:
    plain = shaping()
    assert scores_of(batch(plain, [1.0, -30.0, 2.5], [9, 10, 0])) == [1.0, -30.0, 2.5]
    assert plain.metrics() == {}


def test_running_moments_equal_those_of_everything_at_once() -> None:
    draws = numpy.random.default_rng(0).normal(1e4, 3.0, 100)
    moments = RunningMoments()
    for chunk in numpy.split(draws, [1, 5, 5, 60]):
        moments.update(torch.tensor(chunk), one_rank)
    assert moments.count == 100
    assert moments.mean == pytest.approx(draws.mean(), rel=1e-12)
    assert moments.std == pytest.approx(draws.std(ddof=1), rel=1e-9)


def test_moments_of_two_ranks_are_those_of_both() -> None:
    """Two ranks in lockstep: each is handed the sums that both would give."""
    parts = [torch.tensor([1.0, 2.0], dtype=torch.float64), torch.tensor([6.0], dtype=torch.float64)]
    mean = 3.0
    sums = iter([torch.tensor([3.0, 9.0]).double(), torch.tensor([sum(((p - mean) ** 2).sum() for p in parts)])])
    moments = RunningMoments()
    moments.update(parts[0], lambda local: next(sums))
    assert (moments.count, moments.mean, moments.std) == (3.0, 3.0, pytest.approx(7.0**0.5))


def test_normalisation_over_the_run() -> None:
    scaled, standard = shaping(normalize="scale"), shaping(normalize="standard")
    for made in (scaled, standard):
        assert scores_of(batch(made, [2.0])) == [2.0 if made is scaled else 0.0]  # no spread yet
    seen = numpy.array([2.0, 4.0, 9.0])
    expected = numpy.array([4.0, 9.0]) / seen.std(ddof=1)
    assert scores_of(batch(scaled, [4.0, 9.0])) == pytest.approx(expected, rel=1e-6)
    expected = (numpy.array([4.0, 9.0]) - 5.0) / seen.std(ddof=1)
    assert scores_of(batch(standard, [4.0, 9.0])) == pytest.approx(expected, rel=1e-6)
    assert standard.metrics() == {"reward/running_mean": 5.0, "reward/running_std": pytest.approx(seen.std(ddof=1))}


def test_a_resumed_run_goes_on_with_its_moments(tmp_path: Path) -> None:
    whole, resumed = shaping(normalize="standard"), shaping(normalize="standard")
    batch(whole, [1.0, 5.0, 7.0])
    whole.save(tmp_path / "shaping.json")
    assert json.loads((tmp_path / "shaping.json").read_text())["count"] == 3
    resumed.load(tmp_path / "shaping.json")
    assert scores_of(batch(whole, [3.0])) == scores_of(batch(resumed, [3.0]))


def test_clipping_comes_after_normalisation_and_before_the_penalty() -> None:
    made = shaping(clip_range=[-1.0, 2.0], overlong_buffer={"enable": True, "len": 4, "penalty_factor": 0.5})
    # The penalty begins after 10 - 4 tokens.
    lengths = [0, 6, 7, 9, 10]
    assert scores_of(batch(made, [5.0, -5.0, 1.0, 5.0, 0.0], lengths)) == [2.0, -1.0, 1.0 - 0.125, 2.0 - 0.375, -0.5]
    assert made.metrics() == {"reward/overlong_penalty": pytest.approx((0.125 + 0.375 + 0.5) / 5)}


def test_greedy_baselines_are_on_the_scale_of_the_scores() -> None:
    made = shaping(normalize="standard", clip_range=[-1.0, 0.5])
    samples = [sample(1, place, greedy=GreedyScore(4.0, 0.0, 1)) for place in range(3)]
    shaped = made.batch(samples, ScoredSamples(ScoredBatch([2.0, 4.0, 9.0], {}, [{}] * 3, []), None))
    assert shaped.get("baseline_scores").tolist() == pytest.approx([-1.0 / numpy.std([2, 4, 9], ddof=1)] * 3)


def test_greedy_responses_lose_their_own_penalty_and_keep_the_rewards_of_their_tokens() -> None:
    """Of the greedy response without tokens nothing is left, as of such a sample."""
    made = shaping(clip_range=[-1.0, 2.0], overlong_buffer={"enable": True, "len": 4, "penalty_factor": 0.5})
    greedy = [GreedyScore(5.0, 0.25, 10), GreedyScore(1.0, 3.0, 8), GreedyScore(1.0, 0.0, 6), GreedyScore(-1.0, 0.0, 0)]
    samples = [sample(7, place, one) for place, one in enumerate(greedy)]
    shaped = made.batch(samples, ScoredSamples(ScoredBatch([0.0] * 4, {}, [{}] * 4, []), None))
    assert shaped.get("baseline_scores").tolist() == [2.0 - 0.5 + 0.25, 1.0 - 0.25 + 3.0, 1.0, 0.0]
    assert scores_of(shaped) == [-0.125] * 4
    assert made.metrics() == {"reward/overlong_penalty": pytest.approx(0.125)}  # the samples' alone


def test_rewards_of_tokens_stand_at_their_tokens() -> None:
    samples = [sample(2, 0), sample(3, 1), sample(0, 2)]
    scored = ScoredBatch([0.0, 1.0, 2.0], {}, [{}] * 3, [], token_scores=[None, (0.5, -1.0, 0.25), ()])
    made = shaping(normalize="scale", clip_range=[-9, 9]).batch(samples, ScoredSamples(scored, None))
    assert made.get("token_scores").tolist() == [0, 0, 0, 0, 0, 0, 0.5, -1.0, 0.25, 0, 0]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0], "f returned 1 token rewards for a response of 2 tokens"),
        ([1.0, "2"], "f returned '2' (str) for token 1; return a float"),
        ((1.0, float("inf")), "f returned inf for token 1; a reward must be finite"),
        (Reward(1.0, token_scores="ab"), "f returned token scores 'ab' (str); return a list or tuple"),  # type: ignore[arg-type]
    ],
)
def test_rewards_that_fit_no_tokens(result: object, message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        as_reward(result, "f", 2)
    assert message in str(error.value)


def test_rewards_of_tokens_as_they_may_be_returned() -> None:
    assert as_reward([1, 0.5], "f", 2) == Reward(0.0, token_scores=(1.0, 0.5))
    both = as_reward(Reward(2.0, {"a": 1}, (1.0, 0.5)), "f", 2)
    assert (both.score, both.total, both.details) == (2.0, 3.5, {"a": 1})
