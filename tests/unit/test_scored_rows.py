"""Rows of scored samples, taken and joined; two prompt sets with rewards of their own, on one rank."""

from math import isnan

from megappo.rewards.reward import FailedReward, ScoredBatch
from megappo.workers.reward import ScoredSamples
from megappo.workers.reward_sets import SetRewards
from megappo.workers.scored_rows import joined_rows, taken
from tests.support.samples import make_sample


def scored(scores: list[float], part: str, right: list[bool] | None, failed: tuple[int, ...] = ()) -> ScoredSamples:
    details = [{part: {"row": row}} for row in range(len(scores))]
    failures = [FailedReward(row, part, "broken") for row in failed]
    return ScoredSamples(ScoredBatch(scores, {part: list(scores)}, details, failures), right)


def test_taking_keeps_rows_together() -> None:
    some = taken(scored([1.0, 2.0, 3.0], "a", [True, False, True], failed=(1, 2)), [2, 0, 2])
    assert some.batch.scores == [3.0, 1.0, 3.0] and some.right == [True, True, True]
    assert some.batch.parts == {"a": [3.0, 1.0, 3.0]}
    assert [one["a"]["row"] for one in some.batch.details] == [2, 0, 2]
    assert some.batch.failed == [FailedReward(0, "a", "broken"), FailedReward(2, "a", "broken")]


def test_joining_knows_parts_that_were_not_asked() -> None:
    both = joined_rows([scored([1.0], "a", [True]), scored([2.0, 3.0], "b", None, failed=(1,))])
    assert both.batch.scores == [1.0, 2.0, 3.0] and both.right == [True, False, False]
    assert both.batch.parts["a"][0] == 1.0 and all(map(isnan, both.batch.parts["a"][1:]))
    assert isnan(both.batch.parts["b"][0]) and both.batch.parts["b"][1:] == [2.0, 3.0]
    assert both.batch.failed == [FailedReward(2, "b", "broken")]
    assert joined_rows([scored([1.0], "b", None)]).right is None


class Length:
    """Stands for a reward worker: the length of the text times a factor."""

    def __init__(self, part: str, factor: float) -> None:
        self.part, self.factor = part, factor

    def score(self, samples):  # type: ignore[no-untyped-def]
        return scored([self.factor * len(sample.text) for sample in samples], self.part, None)


def test_each_sample_is_scored_by_its_sets_reward_and_keeps_its_place() -> None:
    import dataclasses

    rewards = SetRewards({"a": Length("one", 1.0), "b": Length("ten", 10.0)})  # type: ignore[dict-item]
    samples = [make_sample(text) for text in ("xxx", "x", "xx", "")]
    samples = [
        dataclasses.replace(sample, prompt=dataclasses.replace(sample.prompt, source=source))
        for sample, source in zip(samples, "baab", strict=True)
    ]
    found = rewards.score(samples)
    assert found.batch.scores == [30.0, 1.0, 2.0, 0.0]
    assert [value for value in found.batch.parts["one"] if not isnan(value)] == [1.0, 2.0]
