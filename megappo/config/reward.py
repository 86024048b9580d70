"""Section `reward`: the named parts whose weighted sum is a sequence's score."""

from typing import Literal

from pydantic import Field

from megappo.config.base import Section


class RewardPartConfig(Section):
    """One part of the score."""

    name: str = Field(min_length=1, examples=["correct"])
    """Name in the metrics: `reward/parts/<name>`."""
    kind: Literal["exact_match", "gsm8k", "math_verify", "function"]
    """A rule by its name, or a function of your own."""
    function: str | None = None
    """`module:function` for kind `function`: takes a sample, returns a float or a Reward."""
    weight: float = 1.0
    """Factor of this part in the score."""


class RewardConfig(Section):
    """The reward of a response."""

    parts: tuple[RewardPartConfig, ...] = Field(min_length=1, examples=["[{name: correct, kind: exact_match}]"])
    timeout_seconds: float = Field(30.0, gt=0)
    """A part that takes longer for one sample counts as failed."""
    failed_score: float = 0.0
    """Score of a part that raised or timed out."""
    max_failed_fraction: float = Field(0.5, ge=0, le=1)
    """Stop the run when more of a step's samples than this fraction failed."""
