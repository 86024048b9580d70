"""What a reward part is and what scoring returns. The rules are in `rules.py`, the weighted sum in `build.py`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megappo.experience.sample import RolloutSample


@dataclass(frozen=True)
class Reward:
    """What a reward function may return instead of a float: the score, and JSON values for the samples file."""

    score: float
    details: Mapping[str, Any] = field(default_factory=dict)


RewardFunction = Callable[[RolloutSample], float | Reward]
"""Scores a response. `sample.text` is the response without special tokens, `sample.prompt.answer` the ground truth."""

AsyncRewardFunction = Callable[[RolloutSample], Awaitable[float | Reward]]
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

    `scores` the weighted sums · `parts` each part's own scores before weighting, by its name · `details` what the parts
    told about each sample, by part · `failed` the parts that got `reward.failed_score` instead of a score.
    """

    scores: list[float]
    parts: dict[str, list[float]]
    details: list[dict[str, Mapping[str, Any]]]
    failed: list[FailedReward]

    @property
    def num_failed(self) -> int:
        """Samples with at least one failed part: `reward/failed`."""
        return len({failure.index for failure in self.failed})
