"""How a row's prompt becomes the text that the model reads: prompt template, system prompt, chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from megappo.config.data import DataConfig
from megappo.config.problem import shortened
from megappo.data.sources import Row
from megappo.data.tokenizer import Message, Tokenizer
from megappo.errors import ConfigError, DataError

PLACEHOLDER = "{prompt}"


class PromptRenderer:
    """Turns a row into the text that the model reads, and texts into token ids."""

    def __init__(self, data: DataConfig, tokenizer: Tokenizer) -> None:
        self._data = data
        self._tokenizer = tokenizer
        chat = tokenizer.has_chat_template if data.apply_chat_template is None else data.apply_chat_template
        if chat and not tokenizer.has_chat_template:
            raise ConfigError(
                "data.apply_chat_template: true, but the tokenizer has no chat template; set it to null or false, "
                "or use a tokenizer folder with chat_template.jinja"
            )
        if data.system_prompt is not None and not chat:
            raise ConfigError(
                f"data.system_prompt: {data.system_prompt!r} needs a chat template, and none is applied; "
                "set it to null and put the text into data.prompt_template"
            )
        if PLACEHOLDER not in data.prompt_template:
            raise ConfigError(
                f"data.prompt_template: {data.prompt_template!r} leaves the prompt out; it must hold {PLACEHOLDER}"
            )
        self._chat = chat

    @property
    def has_chat(self) -> bool:
        """Whether prompts go through the tokenizer's chat template."""
        return self._chat

    def text(self, row: Row) -> str:
        """The row's prompt through `prompt_template` (strings) and the chat template (where one is applied)."""
        messages = self.messages(row)
        if not self._chat:
            return messages[0]["content"]
        try:
            return self._tokenizer.render_chat(messages)
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error

    def messages(self, row: Row) -> list[Message]:
        """The row's prompt as chat turns, before any chat template: a string is one user's turn."""
        value = row.get(self._data.prompt_key, "data.prompt_key")
        if isinstance(value, str):
            # Not str.format: templates of mathematics are full of braces that are no fields.
            messages = [Message(role="user", content=self._data.prompt_template.replace(PLACEHOLDER, value))]
        else:
            messages = chat_messages(value, row, self._data.prompt_key)
            if not self._chat:
                raise DataError(
                    f"{row.place}: {self._data.prompt_key!r} is a list of chat messages, but no chat template is "
                    "applied; use a tokenizer that has one, or prompts that are strings"
                )
        if self._data.system_prompt is not None and messages[0]["role"] != "system":
            messages = [Message(role="system", content=self._data.system_prompt), *messages]
        return messages

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids: rendered chats hold their special tokens, plain text gets the tokenizer's own in front."""
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=not self._chat)
        if self._chat:
            return encoded
        return [_without_end(ids, self._tokenizer.eos_ids) for ids in encoded]


def _without_end(token_ids: list[int], eos_ids: tuple[int, ...]) -> list[int]:
    """Some tokenizers close every text with an end token; a prompt that has ended has no response."""
    return token_ids[:-1] if token_ids and token_ids[-1] in eos_ids else token_ids


def chat_messages(value: Any, row: Row, key: str) -> list[Message]:
    """A column's value as chat turns with all their keys; DataError where it is no list of them.

    Parquet gives every turn the keys of all: those that are null are left out.
    """
    well_formed = (
        isinstance(value, Sequence)
        and len(value) > 0
        and all(isinstance(turn, Mapping) and "role" in turn and _says_something(turn) for turn in value)
    )
    if not well_formed:
        raise DataError(
            f"{row.place}: {key!r} must be a string or a list of messages with role and content, "
            f"not {shortened(repr(value), 80)}"
        )
    return [_message(turn) for turn in value]


def _says_something(turn: Mapping[str, Any]) -> bool:
    return "content" in turn or bool(turn.get("tool_calls"))


def _message(turn: Mapping[str, Any]) -> Message:
    others = {key: of for key, of in turn.items() if key == "content" or of is not None}
    return cast(Message, others | {"role": str(turn["role"])})


def answer_text(value: Any) -> str:
    """A ground truth as text: JSON for numbers, truth values and lists; an object's `ground_truth` where it has one."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and "ground_truth" in value:
        return answer_text(value["ground_truth"])
    if isinstance(value, bool | int | float | Sequence | Mapping):
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)
