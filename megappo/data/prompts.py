"""From rows to token ids: prompts for rollouts, and prompt-response pairs for supervised training."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from megappo.config.data import DataConfig
from megappo.config.data_names import source_name
from megappo.config.problem import shortened
from megappo.data.lengths import fit_prompts, fit_response, refuse_empty
from megappo.data.render import PromptRenderer, answer_text
from megappo.data.sources import Row, read_rows
from megappo.data.tokenizer import Tokenizer
from megappo.errors import DataError
from megappo.experience.sample import Prompt

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SupervisedExample:
    """A prompt and the response to learn: `token_ids[response_start:]` are the targets, end token included."""

    token_ids: tuple[int, ...]
    response_start: int


def load_prompts(
    data: DataConfig,
    tokenizer: Tokenizer,
    files: Sequence[str],
    max_samples: int | None = None,
    *,
    needs_answer: bool = True,
) -> list[Prompt]:
    """The prompts of `files`, in file order; at most the first `max_samples` rows of each, counted before filtering.

    `needs_answer`: a row without the column `data.answer_key` is refused; otherwise its prompt has no answer.

    Raises DataError (file and line, what to do) and ConfigError (settings that the tokenizer can't follow). How many
    prompts were left out or cut is logged.
    """
    render = PromptRenderer(data, tokenizer)
    prompts: list[Prompt] = []
    for file in files:
        found = prompts_of(file, read_rows(file, max_samples), data, tokenizer, render, needs_answer=needs_answer)
        prompts += [prompt for prompt in found if prompt is not None]
    refuse_empty(prompts, data, files)
    return prompts


def prompts_of(
    file: str,
    rows: Sequence[Row],
    data: DataConfig,
    tokenizer: Tokenizer,
    render: PromptRenderer,
    *,
    needs_answer: bool,
) -> list[Prompt | None]:
    """The prompt of each row of `file`, None where it is left out for its length.

    With `needs_answer` a row without the column `data.answer_key` is refused; otherwise its prompt has no answer.
    """
    texts = [render.text(row) for row in rows]
    fitted = fit_prompts(data, rows, render.encode(texts))
    fitted.report(file, data)
    prompts: list[Prompt | None] = []
    for row, text, token_ids in zip(rows, texts, fitted.token_ids, strict=True):
        if token_ids is None:
            prompts.append(None)
            continue
        has_answer = data.answer_key is not None and (needs_answer or row.columns.get(data.answer_key) is not None)
        prompts.append(
            Prompt(
                index=row.index,
                source=source_name(file),
                token_ids=tuple(token_ids),
                text=text if row.index not in fitted.cut else tokenizer.decode(token_ids, skip_special_tokens=False),
                answer=answer_text(row.get(str(data.answer_key), "data.answer_key")) if has_answer else None,
                extra={k: v for k, v in row.columns.items() if k not in (data.prompt_key, data.answer_key)},
                messages=tuple(dict(turn) for turn in render.messages(row)),
            )
        )
    return prompts


def load_supervised(
    data: DataConfig, tokenizer: Tokenizer, files: Sequence[str], max_samples: int | None = None
) -> list[SupervisedExample]:
    """Prompt, response (`data.response_key`) and end token of each row, for supervised training.

    Prompts are cut as in `load_prompts`. A response of more than `max_response_length` tokens, end token included, is
    an error with `error`, left out with `filter`, and otherwise loses its end (and then has no end token).
    """
    render = PromptRenderer(data, tokenizer)
    examples: list[SupervisedExample] = []
    for file in files:
        rows = read_rows(file, max_samples)
        texts = [render.text(row) for row in rows]
        prompt_ids = render.encode(texts)
        responses = [_response_text(row, data.response_key) for row in rows]
        joint_ids = render.encode([text + response for text, response in zip(texts, responses, strict=True)])
        fitted = fit_prompts(data, rows, prompt_ids)
        dropped = 0
        for row, prompt, joint, response, kept in zip(
            rows, prompt_ids, joint_ids, responses, fitted.token_ids, strict=True
        ):
            if kept is None:
                continue
            target = fit_response(data, row, [*response_ids(tokenizer, prompt, joint, response), tokenizer.eos_id])
            if target is None:
                dropped += 1
                continue
            examples.append(SupervisedExample((*kept, *target), response_start=len(kept)))
        fitted.report(file, data)
        if dropped:
            _log.warning("%s: left out %d responses of over %d tokens", file, dropped, data.max_response_length)
    refuse_empty(examples, data, files)
    return examples


def _response_text(row: Row, key: str) -> str:
    value = row.get(key, "data.response_key")
    if not isinstance(value, str):
        raise DataError(f"{row.place}: column {key!r} must be a string, not {shortened(repr(value), 80)}")
    return value


def response_ids(tokenizer: Tokenizer, prompt: list[int], joint: list[int], response: str) -> list[int]:
    """The response as it follows the prompt in one text; on its own where a token would span the border."""
    if joint[: len(prompt)] == prompt:
        return joint[len(prompt) :]
    return tokenizer.encode_after(response)
