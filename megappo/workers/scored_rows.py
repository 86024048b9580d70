"""Rows of scored samples: taking some, and joining several lots. Scoring itself is in `reward.py`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megappo.rewards.reward import FailedReward, ScoredBatch
from megappo.workers.reward import ScoredSamples

NOT_SCORED = float("nan")
"""In the place of a part's score where the part was not asked: another prompt set's."""


def taken(scored: ScoredSamples, rows: Sequence[int]) -> ScoredSamples:
    """The rows with those numbers, in that order; a number may come several times."""
    failed = [
        dataclasses.replace(failure, index=place)
        for place, row in enumerate(rows)
        for failure in scored.batch.failed
        if failure.index == row
    ]
    fields = {
        field.name: _taken(getattr(scored.batch, field.name), rows)
        for field in dataclasses.fields(scored.batch)
        if field.name != "failed"
    }
    right = None if scored.right is None else [scored.right[row] for row in rows]
    return ScoredSamples(ScoredBatch(**fields, failed=failed), right)


def joined_rows(lots: Sequence[ScoredSamples]) -> ScoredSamples:
    """The rows of all lots, one lot after another; a part that a lot does not have is `NOT_SCORED` there.

    `right` is false where a lot's prompts have no rule, None where none has.
    """
    sizes = [len(lot.batch.scores) for lot in lots]
    failed: list[FailedReward] = []
    for start, lot in zip(_starts(sizes), lots, strict=True):
        failed += [dataclasses.replace(failure, index=start + failure.index) for failure in lot.batch.failed]
    fields = {
        field.name: _joined([getattr(lot.batch, field.name) for lot in lots], sizes)
        for field in dataclasses.fields(ScoredBatch)
        if field.name != "failed"
    }
    has_rule = any(lot.right is not None for lot in lots)
    right = [value for lot, size in zip(lots, sizes, strict=True) for value in lot.right or [False] * size]
    return ScoredSamples(ScoredBatch(**fields, failed=failed), right if has_rule else None)


def _starts(sizes: Sequence[int]) -> list[int]:
    return [sum(sizes[:number]) for number in range(len(sizes))]


def _taken(value: Any, rows: Sequence[int]) -> Any:
    """Of a column (a list), or of columns by name."""
    if value is None:
        return None
    if isinstance(value, Mapping):
        return {name: _taken(column, rows) for name, column in value.items()}
    assert isinstance(value, list), f"a column of scored samples is a list, not a {type(value).__name__}"
    return [value[row] for row in rows]


def _joined(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    if all(value is None for value in values):
        return None
    if isinstance(values[0], Mapping):
        names = dict.fromkeys(name for value in values for name in value)
        return {
            name: [
                entry
                for value, size in zip(values, sizes, strict=True)
                for entry in value.get(name, [NOT_SCORED] * size)
            ]
            for name in names
        }
    return [
        entry
        for value, size in zip(values, sizes, strict=True)
        for entry in (value if value is not None else [None] * size)
    ]
