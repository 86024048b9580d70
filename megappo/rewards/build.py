"""From the `reward` section to scores: the weighted sum of the parts, fallbacks of failed ones, and when to stop."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from megappo.config.reward import RewardConfig, RewardPartConfig
from megappo.errors import ConfigError, RewardError
from megappo.experience.sample import RolloutSample
from megappo.rewards.function import load_function
from megappo.rewards.pool import RewardPool
from megappo.rewards.process import MATH_VERIFY, Answer, Call, Part, is_async
from megappo.rewards.reward import FailedReward, Reward, RewardFunction, ScoredBatch
from megappo.rewards.rules import exact_match, gsm8k

SumCounts = Callable[[list[int]], list[int]]
"""Sums counts over the data-parallel ranks, so that all of them stop or none."""

INLINE_RULES: dict[str, RewardFunction] = {"exact_match": exact_match, "gsm8k": gsm8k}
MAX_PROCESSES = 8


def build_reward(config: RewardConfig, num_processes: int | None = None) -> RewardScorer:
    """The scorer of a `reward` section. Imports the user's functions, so that a wrong name fails here, not in a step.

    `num_processes`: reward processes of this rank at most; by default its share of the machine's cores, 1 to 8. They
    are started by the first `score` that needs them. Raises ConfigError and RewardError.
    """
    names = [part.name for part in config.parts]
    async_parts: set[int] = set()
    pooled: list[Part] = []
    for index, part in enumerate(config.parts):
        where = f"reward.parts[{index}]"
        if part.name in names[:index]:
            raise ConfigError(f"{where}.name: {part.name!r} is taken; metrics need a name of its own for each part")
        if (part.kind == "function") != (part.function is not None):
            raise ConfigError(
                f"{where}.function: {part.function!r} with kind {part.kind!r}; a module:function goes with kind "
                "'function', and with no other"
            )
        if part.kind == "function" and part.function is not None:
            if is_async(_imported(f"{where}.function", part.function)):
                async_parts.add(len(pooled))
            pooled.append(Part(part.name, part.function))
        elif part.kind == "math_verify":
            pooled.append(Part(part.name, MATH_VERIFY))
    size = num_processes or _share_of_cores()
    return RewardScorer(config, RewardPool(pooled, frozenset(async_parts), size, config.timeout_seconds), pooled)


def _imported(where: str, function: str) -> Callable[..., Any]:
    try:
        return load_function(function)
    except RewardError as error:
        raise RewardError(f"{where}: {error}") from error


def _share_of_cores() -> int:
    # torchrun and Slurm launchers say how many ranks share this machine; alone, all cores are ours.
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MAX_PROCESSES, len(os.sched_getaffinity(0)) // ranks_here))


class TooManyFailed(RewardError):
    """More samples failed than `reward.max_failed_fraction` allows; `first`: this rank's first failure."""

    def __init__(self, num_failed: int, total: int, allowed: float, first: FailedReward | None) -> None:
        example = f"the first, of part {first.part!r}:\n{first.error}" if first else "none of them on this rank"
        super().__init__(
            f"rewards failed on {num_failed} of {total} samples, more than reward.max_failed_fraction={allowed:g} "
            f"allows; {example}"
        )
        self.num_failed = num_failed
        self.total = total
        self.allowed = allowed
        self.first = first

    def told_by_all(self, first: FailedReward | None) -> RewardError:
        """The same error with the first failure of all ranks, fit to be sent to others."""
        return RewardError(str(TooManyFailed(self.num_failed, self.total, self.allowed, first)))


class RewardScorer:
    """Scores samples; close it (or use it as a context) to end its processes."""

    def __init__(self, config: RewardConfig, pool: RewardPool, pooled: Sequence[Part]) -> None:
        self._config = config
        self._pool = pool
        self._pooled_index = {part.name: index for index, part in enumerate(pooled)}

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the reward processes."""
        self._pool.close()

    def score(self, samples: Sequence[RolloutSample], sum_over_ranks: SumCounts | None = None) -> ScoredBatch:
        """Scores of `samples`, in their order.

        A part that raises or takes over `reward.timeout_seconds` on a sample counts as failed there and contributes
        `reward.failed_score`. Raises RewardError, on all ranks alike if `sum_over_ranks` is given, where more than
        `reward.max_failed_fraction` of the samples have a failed part.
        """
        outcomes = {part.name: self._part_outcomes(part, samples) for part in self._config.parts}
        scored = self._combine(samples, outcomes)
        self._stop_if_too_many_failed(scored, len(samples), sum_over_ranks)
        return scored

    def _part_outcomes(self, part: RewardPartConfig, samples: Sequence[RolloutSample]) -> list[Reward | FailedReward]:
        if part.kind in INLINE_RULES:
            return [_inline(INLINE_RULES[part.kind], part.name, index, sample) for index, sample in enumerate(samples)]
        number = self._pooled_index[part.name]
        answers = self._pool.run([Call(index, number, sample) for index, sample in enumerate(samples)])
        return [_outcome(answers[index], part.name) for index in range(len(samples))]

    def _combine(
        self, samples: Sequence[RolloutSample], outcomes: dict[str, list[Reward | FailedReward]]
    ) -> ScoredBatch:
        scores = [0.0] * len(samples)
        details: list[dict[str, Mapping[str, Any]]] = [{} for _ in samples]
        parts: dict[str, list[float]] = {}
        failed: list[FailedReward] = []
        for part in self._config.parts:
            values: list[float] = []
            for index, outcome in enumerate(outcomes[part.name]):
                if isinstance(outcome, FailedReward):
                    failed.append(outcome)
                    values.append(self._config.failed_score)
                    continue
                values.append(outcome.score)
                if outcome.details:
                    details[index][part.name] = outcome.details
            parts[part.name] = values
            scores = [total + part.weight * value for total, value in zip(scores, values, strict=True)]
        return ScoredBatch(scores, parts, details, failed)

    def _stop_if_too_many_failed(self, scored: ScoredBatch, num_samples: int, sum_over_ranks: SumCounts | None) -> None:
        counts = [scored.num_failed, num_samples]
        num_failed, total = sum_over_ranks(counts) if sum_over_ranks else counts
        if num_failed <= self._config.max_failed_fraction * total:
            return
        allowed = self._config.max_failed_fraction
        raise TooManyFailed(num_failed, total, allowed, scored.failed[0] if scored.failed else None)


def _inline(rule: RewardFunction, part: str, index: int, sample: RolloutSample) -> Reward | FailedReward:
    try:
        result = rule(sample)
    except ValueError as error:
        return FailedReward(index, part, str(error))
    return result if isinstance(result, Reward) else Reward(result)


def _outcome(answer: Answer, part: str) -> Reward | FailedReward:
    if answer.score is None:
        return FailedReward(answer.key, part, answer.error)
    return Reward(answer.score, json.loads(answer.details))
