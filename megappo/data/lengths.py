"""Token limits of prompts and responses: what `data.overlong_prompts` does to those that exceed them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from megappo.config.data import DataConfig
from megappo.data.sources import Row
from megappo.errors import DataError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FittedPrompts:
    """Prompts within the limit: ids (None where left out), and the rows that were cut."""

    token_ids: list[list[int] | None]
    cut: frozenset[int]

    def report(self, file: str, data: DataConfig) -> None:
        """Warns of prompts of `file` that were left out or cut."""
        left_out = sum(ids is None for ids in self.token_ids)
        total, limit = len(self.token_ids), data.max_prompt_length
        if left_out:
            _log.warning("%s: left out %d of %d prompts of over %d tokens", file, left_out, total, limit)
        if self.cut:
            side = "start" if data.overlong_prompts == "left" else "end"
            _log.warning("%s: cut the %s of %d of %d prompts to %d tokens", file, side, len(self.cut), total, limit)


def fit_prompts(data: DataConfig, rows: Sequence[Row], encoded: Sequence[list[int]]) -> FittedPrompts:
    """Applies `data.overlong_prompts` to each prompt."""
    limit = data.max_prompt_length
    fitted: list[list[int] | None] = []
    cut: set[int] = set()
    for row, token_ids in zip(rows, encoded, strict=True):
        if not token_ids:
            raise DataError(f"{row.place}: the prompt has no tokens; a response needs at least one before it")
        if len(token_ids) <= limit:
            fitted.append(token_ids)
        elif data.overlong_prompts == "error":
            raise DataError(
                f"{row.place}: the prompt has {len(token_ids)} tokens, data.max_prompt_length is {limit}; set "
                f"data.max_prompt_length={len(token_ids)} or more, or data.overlong_prompts to left, right or filter"
            )
        elif data.overlong_prompts == "filter":
            fitted.append(None)
        else:
            cut.add(row.index)
            fitted.append(token_ids[-limit:] if data.overlong_prompts == "left" else token_ids[:limit])
    return FittedPrompts(fitted, frozenset(cut))


def refuse_empty(loaded: Sequence[object], data: DataConfig, files: Sequence[str]) -> None:
    """Raises DataError where filtering has left nothing of `files`."""
    if not loaded:
        raise DataError(
            f"{', '.join(files)}: nothing is left after filtering by data.max_prompt_length="
            f"{data.max_prompt_length} and data.max_response_length={data.max_response_length}; raise them"
        )


def fit_response(data: DataConfig, row: Row, target: list[int]) -> list[int] | None:
    """The token ids of a target within `data.max_response_length`; None where the row is left out.

    Raises DataError where `data.overlong_prompts` is `error` and it is longer.
    """
    limit = data.max_response_length
    if len(target) <= limit:
        return target
    if data.overlong_prompts == "error":
        raise DataError(
            f"{row.place}: the response has {len(target)} tokens with its end token, data.max_response_length is "
            f"{limit}; set data.max_response_length={len(target)} or more, or data.overlong_prompts to right or filter"
        )
    return None if data.overlong_prompts == "filter" else target[:limit]
