"""What a reward part is and what scoring returns. The rules are in `rules.py`, the weighted sum in `build.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megappo.experience.sample import RolloutSample


@dataclass(frozen=True)
class Reward:
    """What a reward function may return instead of a float: the score, JSON values for the samples file, and rewards
    of single tokens.

    `score` lands on the last response token. `token_scores` has one float for each of `sample.response_ids`, each of
    which lands on its token: `ExperienceBatch.token_scores`. Those of an environment's tokens are not taken.
    """

    score: float
    details: Mapping[str, Any] = field(default_factory=dict)
    token_scores: tuple[float, ...] | None = None

    @property
    def total(self) -> float:
        """The score and the tokens' rewards together."""
        return self.score + sum(self.token_scores or ())


RewardFunction = Callable[[RolloutSample], float | Sequence[float] | Reward]
"""Scores a response. `sample.text` is the response without special tokens, `sample.prompt.answer` the ground truth."""

AsyncRewardFunction = Callable[[RolloutSample], Awaitable[float | Sequence[float] | Reward]]
"""The same for `async def`: many of its calls run at once in a reward process, for judges behind a network."""


@dataclass(frozen=True)
class FailedReward:
    """A part that raised or timed out on a sample: `index` is the sample's place in the list that was scored."""

    index: int
    part: str
    error: str


@dataclass(frozen=True)
class ScoredBatch:
    """Scores in the order of the samples.

    `scores` the weighted sums · `parts` each part's own scores before weighting, by its name, its tokens' rewards added
    up · `details` what the parts told about each sample, by part · `failed` the parts that got `reward.failed_score`
    instead of a score · `token_scores` the weighted sums of the tokens' rewards of each sample that has any (None where
    no sample has), 0 at tokens that an environment put in.
    """

    scores: list[float]
    parts: dict[str, list[float]]
    details: list[dict[str, Mapping[str, Any]]]
    failed: list[FailedReward]
    token_scores: list[tuple[float, ...] | None] | None = None

    @property
    def totals(self) -> list[float]:
        """The scores with the rewards of the sample's single tokens: all that a sample is worth, wherever one number is
        asked for. Training shapes the scores among them."""
        if self.token_scores is None:
            return self.scores
        return [score + sum(tokens or ()) for score, tokens in zip(self.scores, self.token_scores, strict=True)]

    @property
    def num_failed(self) -> int:
        """Samples with at least one failed part: `reward/failed`."""
        return len({failure.index for failure in self.failed})
