"""Preference pairs: rows of a prompt, a better and a worse response, as text and as the actor's token ids."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megappo.config.data import DataConfig
from megappo.config.problem import shortened
from megappo.data.lengths import fit_response, refuse_empty
from megappo.data.prompts import prompts_of, response_ids
from megappo.data.render import PromptRenderer, chat_messages
from megappo.data.sources import Row, read_rows
from megappo.data.tokenizer import Message, Tokenizer
from megappo.errors import DataError
from megappo.experience.sample import Prompt

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PreferencePair:
    """A prompt with the response that was chosen and the one that was rejected.

    `chosen_ids` and `rejected_ids` follow `prompt.token_ids` and end with the end token (unless they were cut).
    """

    prompt: Prompt
    chosen: str
    rejected: str
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]


@dataclass(frozen=True)
class _Response:
    """A row's response: its text, and its token ids after the row's whole prompt, end token included."""

    text: str
    token_ids: list[int]


def load_preferences(
    data: DataConfig, tokenizer: Tokenizer, files: Sequence[str], max_samples: int | None = None
) -> list[PreferencePair]:
    """The pairs of `files`, in file order; at most the first `max_samples` rows of each, counted before filtering.

    Columns are `data.prompt_key`, `chosen_key` and `rejected_key`. A response is a string, or a list of chat messages:
    one assistant's turn, alone or after the prompt's turns. Lengths are as in `load_supervised`. A pair whose two
    responses are the same teaches nothing and is left out; the log counts them. Raises DataError with file and line.
    """
    render = PromptRenderer(data, tokenizer)
    pairs: list[PreferencePair] = []
    for file in files:
        rows = read_rows(file, max_samples)
        chosen = _responses(rows, data.chosen_key, "data.chosen_key", render, tokenizer)
        rejected = _responses(rows, data.rejected_key, "data.rejected_key", render, tokenizer)
        prompts = prompts_of(file, rows, data, tokenizer, render, needs_answer=False)
        same = too_long = 0
        for row, prompt, better, worse in zip(rows, prompts, chosen, rejected, strict=True):
            if prompt is None:
                continue
            if better.text == worse.text:
                same += 1
                continue
            fitted = [fit_response(data, row, response.token_ids) for response in (better, worse)]
            if fitted[0] is None or fitted[1] is None:
                too_long += 1
                continue
            pairs.append(PreferencePair(prompt, better.text, worse.text, tuple(fitted[0]), tuple(fitted[1])))
        if same or too_long:
            _log.warning(
                "%s: left out %d pairs of two equal responses, and %d with a response of over %d tokens",
                file, same, too_long, data.max_response_length,
            )  # fmt: skip
    refuse_empty(pairs, data, files)
    return pairs


def _responses(
    rows: Sequence[Row], key: str, setting: str, render: PromptRenderer, tokenizer: Tokenizer
) -> list[_Response]:
    prompts = [render.text(row) for row in rows]
    texts = [_response_text(row, key, setting, render) for row in rows]
    joint = render.encode([prompt + text for prompt, text in zip(prompts, texts, strict=True)])
    return [
        _Response(text, [*response_ids(tokenizer, prompt, together, text), tokenizer.eos_id])
        for prompt, together, text in zip(render.encode(prompts), joint, texts, strict=True)
    ]


def _response_text(row: Row, key: str, setting: str, render: PromptRenderer) -> str:
    value = row.get(key, setting)
    if isinstance(value, str):
        return value
    turns = chat_messages(value, row, key)
    prompt = render.messages(row)
    if len(turns) > 1:
        turns = _without_prompt(turns, prompt)
    if len(turns) != 1 or turns[0]["role"] != "assistant" or not isinstance(turns[0].get("content"), str):
        raise DataError(
            f"{row.place}: {key!r} must be a string or one assistant's turn, alone or after the turns of the prompt "
            f"exactly as they stand there, not {shortened(repr(value), 80)}"
        )
    if turns[0].get("tool_calls"):
        raise DataError(
            f"{row.place}: {key!r} is an assistant's turn with tool_calls; write it as a string, as the model writes it"
        )
    return turns[0]["content"]


def _without_prompt(turns: list[Message], prompt: list[Message]) -> list[Message]:
    """The turns after those of the prompt, whose system turn a response may leave out."""
    for head in (prompt, prompt[1:] if prompt[0]["role"] == "system" else prompt):
        if head and _without_nulls(turns[: len(head)]) == _without_nulls(head):
            return turns[len(head) :]
    return turns


def _without_nulls(value: Any) -> Any:
    """Without the keys that are null: Parquet gives an object of one column those of the column's other rows."""
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value
