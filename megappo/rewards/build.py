"""From the `reward` section to scores: the weighted sum of the parts, fallbacks of failed ones, and when to stop."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from megappo.config.reward import RewardConfig, RewardPartConfig
from megappo.errors import ConfigError, RewardError
from megappo.experience.sample import RolloutSample
from megappo.rewards.function import as_reward, load_function
from megappo.rewards.http import HttpPart
from megappo.rewards.pool import RewardPool
from megappo.rewards.process import MATH_VERIFY, Answer, Call, Part, is_async
from megappo.rewards.reward import FailedReward, Reward, RewardFunction, ScoredBatch
from megappo.rewards.rules import answer_line, exact_match, gsm8k

SumCounts = Callable[[list[int]], list[int]]
"""Sums counts over the data-parallel ranks, so that all of them stop or none."""

INLINE_RULES: dict[str, RewardFunction] = {
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "answer_line": answer_line,
}
MAX_PROCESSES = 8
NODE_CORES = "MEGAPPO_NODE_CORES"
"""Environment variable: cores of all ranks on this machine together, set by `join_slurm` of launch/env.sh."""
NEEDED = {"function": "function", "url": "http", "path": "model", "policy": "implicit"}
"""Setting of a part → the kind that needs it, and the only one that takes it."""

Outcome = Reward | FailedReward


def build_reward(config: RewardConfig, num_processes: int | None = None) -> RewardScorer:
    """The scorer of a `reward` section. Imports the user's functions, so that a wrong name fails here, not in a step.

    `num_processes`: reward processes of this rank at most; by default its share of the machine's cores, 1 to 8. They
    are started by the first `score` that needs them. Raises ConfigError and RewardError.
    """
    names = [part.name for part in config.parts]
    async_parts: set[int] = set()
    pooled: list[Part] = []
    services: dict[str, HttpPart] = {}
    for index, part in enumerate(config.parts):
        where = f"reward.parts[{index}]"
        if part.name in names[:index]:
            raise ConfigError(f"{where}.name: {part.name!r} is taken; metrics need a name of its own for each part")
        for setting, kind in NEEDED.items():
            if (part.kind == kind) != (getattr(part, setting) is not None):
                raise ConfigError(
                    f"{where}.{setting}: {getattr(part, setting)!r} with kind {part.kind!r}; {setting} goes with kind "
                    f"{kind!r}, and with no other"
                )
        if part.kind == "function" and part.function is not None:
            if is_async(_imported(f"{where}.function", part.function)):
                async_parts.add(len(pooled))
            pooled.append(Part(part.name, part.function))
        elif part.kind == "math_verify":
            pooled.append(Part(part.name, MATH_VERIFY))
        elif part.kind == "http":
            services[part.name] = HttpPart(part, config.timeout_seconds)
    size = num_processes or share_of_cores()
    pool = RewardPool(pooled, frozenset(async_parts), size, config.timeout_seconds)
    return RewardScorer(config, pool, pooled, services)


def _imported(where: str, function: str) -> Callable[..., Any]:
    try:
        return load_function(function)
    except RewardError as error:
        raise RewardError(f"{where}: {error}") from error


def share_of_cores() -> int:
    """Reward processes that this rank may keep busy beside those of the other ranks here, 1 to 8."""
    # torchrun and Slurm launchers say how many ranks share this machine; alone, all cores are ours. Ranks see the cores
    # that they share, but for tasks that Slurm has bound to cores of their own: of those, it tells how many all have.
    ours = len(os.sched_getaffinity(0))
    shared = int(os.environ.get(NODE_CORES, ours))
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(MAX_PROCESSES, ours, shared // ranks_here))


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

    def __init__(
        self, config: RewardConfig, pool: RewardPool, pooled: Sequence[Part], services: Mapping[str, HttpPart]
    ) -> None:
        self._config = config
        self._pool = pool
        self._pooled = pooled
        self._services = services
        self._next_key = 0
        self._begun: dict[int, tuple[int, RolloutSample]] = {}

    def __enter__(self) -> RewardScorer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the reward processes."""
        self._pool.close()
        for service in self._services.values():
            service.close()

    def begin(self, sample: RolloutSample) -> None:
        """Starts the slow parts of a sample that `score` will be asked for, while others are still generated.

        Never waits and never raises: what goes wrong is told by `score`. A sample is known again by its position, its
        prompt and its tokens; one that comes out otherwise is scored anew.
        """
        self._begun[sample.position] = (self._submit(sample), sample)

    def score(
        self,
        samples: Sequence[RolloutSample],
        sum_over_ranks: SumCounts | None = None,
        models: Mapping[str, Sequence[Outcome]] | None = None,
    ) -> ScoredBatch:
        """Scores of `samples`, in their order. `models`: the outcomes of parts that models on the ranks score, by
        their names.

        A part that raises or takes over `reward.timeout_seconds` on a sample counts as failed there and contributes
        `reward.failed_score`. Raises RewardError, on all ranks alike if `sum_over_ranks` is given, where more than
        `reward.max_failed_fraction` of the samples have a failed part.
        """
        keys = [self._key_of(sample) for sample in samples]
        outcomes: dict[str, Sequence[Outcome]] = dict(models or {})
        for part in self._config.parts:
            if part.name not in outcomes:
                outcomes[part.name] = self._part_outcomes(part, samples, keys)
        scored = self._combine(samples, outcomes)
        self._stop_if_too_many_failed(scored, len(samples), sum_over_ranks)
        return scored

    def _key_of(self, sample: RolloutSample) -> int:
        key, begun = self._begun.pop(sample.position, (None, None))
        if key is not None and begun is not None and _is_same(begun, sample):
            return key
        return self._submit(sample)

    def _submit(self, sample: RolloutSample) -> int:
        """Gives the sample to every slow part; returns its key."""
        key = self._next_key
        self._next_key += 1
        if self._pooled:
            bare = dataclasses.replace(sample, routed_experts=None)  # many bytes, and none of a reward's business
            self._pool.submit([Call(self._pool_key(key, part), part, bare) for part in range(len(self._pooled))])
        for service in self._services.values():
            service.submit(key, sample)
        return key

    def _pool_key(self, key: int, part: int) -> int:
        return key * len(self._pooled) + part

    def _part_outcomes(
        self, part: RewardPartConfig, samples: Sequence[RolloutSample], keys: Sequence[int]
    ) -> list[Outcome]:
        assert part.kind not in ("model", "implicit"), (
            f"the scores of part {part.name!r} are computed on the ranks of its model"
        )
        if part.kind in INLINE_RULES:
            return [_inline(INLINE_RULES[part.kind], part.name, index, sample) for index, sample in enumerate(samples)]
        if part.name in self._services:
            found = self._services[part.name].collect(keys)
            return [_at(index, found[key]) for index, key in enumerate(keys)]
        number = next(number for number, pooled in enumerate(self._pooled) if pooled.name == part.name)
        pool_keys = [self._pool_key(key, number) for key in keys]
        answers = self._pool.collect(pool_keys)
        return [_outcome(answers[key], part.name, index) for index, key in enumerate(pool_keys)]

    def _combine(self, samples: Sequence[RolloutSample], outcomes: Mapping[str, Sequence[Outcome]]) -> ScoredBatch:
        scores = [0.0] * len(samples)
        details: list[dict[str, Mapping[str, Any]]] = [{} for _ in samples]
        parts: dict[str, list[float]] = {}
        failed: list[FailedReward] = []
        token_scores: list[tuple[float, ...] | None] = [None] * len(samples)
        for part in self._config.parts:
            values: list[float] = []
            own = [_of_policy(outcome, sample) for outcome, sample in zip(outcomes[part.name], samples, strict=True)]
            for index, outcome in enumerate(own):
                if isinstance(outcome, FailedReward):
                    failed.append(outcome)
                    values.append(self._config.failed_score)
                    continue
                values.append(outcome.total)
                if outcome.details:
                    details[index][part.name] = outcome.details
                if outcome.token_scores is not None:
                    token_scores[index] = _added(token_scores[index], part.weight, outcome.token_scores)
            parts[part.name] = values
            landing = [outcome.score if isinstance(outcome, Reward) else self._config.failed_score for outcome in own]
            scores = [total + part.weight * value for total, value in zip(scores, landing, strict=True)]
        has_token_scores = any(values is not None for values in token_scores)
        return ScoredBatch(scores, parts, details, failed, token_scores if has_token_scores else None)

    def _stop_if_too_many_failed(self, scored: ScoredBatch, num_samples: int, sum_over_ranks: SumCounts | None) -> None:
        counts = [scored.num_failed, num_samples]
        num_failed, total = sum_over_ranks(counts) if sum_over_ranks else counts
        if num_failed <= self._config.max_failed_fraction * total:
            return
        allowed = self._config.max_failed_fraction
        raise TooManyFailed(num_failed, total, allowed, scored.failed[0] if scored.failed else None)


def _is_same(begun: RolloutSample, sample: RolloutSample) -> bool:
    return begun.prompt == sample.prompt and begun.response_ids == sample.response_ids and begun.text == sample.text


def _of_policy(outcome: Outcome, sample: RolloutSample) -> Outcome:
    """The outcome without rewards of tokens that an environment put in, which no estimator sees: dropped here, they are
    in none of the numbers that say what the sample is worth."""
    if isinstance(outcome, FailedReward) or outcome.token_scores is None or sample.mask is None:
        return outcome
    own = tuple(value if is_own else 0.0 for value, is_own in zip(outcome.token_scores, sample.mask, strict=True))
    return dataclasses.replace(outcome, token_scores=own)


def _added(sums: tuple[float, ...] | None, weight: float, values: Sequence[float]) -> tuple[float, ...]:
    """The weighted rewards of the tokens, added to those of other parts."""
    return tuple(total + weight * value for total, value in zip(sums or [0.0] * len(values), values, strict=True))


def _inline(rule: RewardFunction, part: str, index: int, sample: RolloutSample) -> Outcome:
    try:
        result = rule(sample)
    except ValueError as error:
        return FailedReward(index, part, str(error))
    return as_reward(result, part)


def _outcome(answer: Answer, part: str, index: int) -> Outcome:
    if answer.score is None:
        return FailedReward(index, part, answer.error)
    return Reward(answer.score, json.loads(answer.details), answer.token_scores)


def _at(index: int, outcome: Outcome) -> Outcome:
    return dataclasses.replace(outcome, index=index) if isinstance(outcome, FailedReward) else outcome
