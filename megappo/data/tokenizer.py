"""The tokenizer of a run: a thin, typed face of a Hugging Face tokenizer. Prompts are in `prompts.py`."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

from megappo.config.checkpoint_names import readable
from megappo.config.data_names import HUB_PREFIX
from megappo.config.model import ModelConfig
from megappo.data.sources import first_line
from megappo.errors import DataError

_log = logging.getLogger(__name__)

ANCHOR = "\n"
"""Stands for text before another: no pre-tokenizer joins it with a word, a number or a space that follows."""


class Message(TypedDict):
    """One turn of a chat, as chat templates take it. A turn of data has the row's other keys too (`tool_calls`, `name`,
    `tool_call_id`), and may have no content where it has `tool_calls`."""

    role: str
    content: str


class Tokenizer:
    """Text to token ids and back.

    `eos_ids` are all tokens that end a response, the tokenizer's own first; `pad_id` is the end token where the
    tokenizer has no padding of its own.
    """

    def __init__(self, backend: Any, eos_ids: tuple[int, ...], pad_id: int) -> None:
        self._backend = backend
        self.eos_ids = eos_ids
        self.pad_id = pad_id

    @property
    def eos_id(self) -> int:
        """The end token that supervised targets get."""
        return self.eos_ids[0]

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added ones included."""
        return len(self._backend)

    @property
    def has_chat_template(self) -> bool:
        return self._backend.chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; with `add_special_tokens`, what the tokenizer adds of its own around a text."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_after(self, text: str) -> list[int]:
        """Token ids of `text` where it goes on from another text, without special tokens around.

        SentencePiece's tokenizers (Llama 2, Mistral) put a space before a text, and between two parts of one there is
        none: they encode `text` behind an anchor, whose tokens are cut off. Where those are not how both together
        begin, and with other tokenizers, `text` is encoded alone.
        """
        anchor, joint = self.encode_batch([ANCHOR, ANCHOR + text]) if self._begins_with_space else ([], [])
        return joint[len(anchor) :] if anchor and joint[: len(anchor)] == anchor else self.encode(text)

    @cached_property
    def _begins_with_space(self) -> bool:
        alone, anchor, joint = self.encode_batch(["a", ANCHOR, ANCHOR + "a"])
        return joint != anchor + alone

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        """`encode` of many texts, faster than one by one."""
        if not texts:
            return []
        encoded: list[list[int]] = self._backend(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
        return encoded

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The chat as text, ready for the assistant's turn; `encode` it without special tokens, it holds its own.

        Raises DataError with the template's own words where it refuses the messages.
        """
        from jinja2.exceptions import TemplateError

        try:
            text: str = self._backend.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError) as error:  # TypeError: a template that joins texts, and content is null
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(f"the chat template refuses messages with the roles [{roles}]: {error}") from error
        return text

    def save(self, folder: str | Path) -> None:
        """Writes the tokenizer's own files into a Hugging Face folder."""
        self._backend.save_pretrained(str(folder))


def load_tokenizer(folder: str | Path, model_folder: str | Path | None = None) -> Tokenizer:
    """The tokenizer of a Hugging Face folder, or of `hub:ORG/NAME`; only the latter may reach the network.

    `model_folder` is the model's where that is another: its generation_config.json names end tokens too, unless
    `folder` has one. Raises DataError where there is no tokenizer, or where it has no end-of-sequence token.
    """
    # Seconds to import, and most commands need no tokenizer.
    from transformers import AutoTokenizer

    from_hub = str(folder).startswith(HUB_PREFIX)
    name = str(folder) if from_hub else str(readable(folder))
    if not from_hub and not Path(name).is_dir():
        raise DataError(
            f"tokenizer folder {name!r} does not exist (looked in {Path.cwd()}); give a Hugging Face folder with "
            f"tokenizer.json or tokenizer.model, or {HUB_PREFIX}ORG/NAME"
        )
    try:
        backend = AutoTokenizer.from_pretrained(name.removeprefix(HUB_PREFIX), local_files_only=not from_hub)
    except (OSError, ValueError, ImportError, KeyError) as error:
        where = "on the hub" if from_hub else "in the folder"
        raise DataError(f"no usable tokenizer {where} {name!r}: {first_line(error)}") from error
    folders = [readable(one) for one in ((None if from_hub else name), model_folder) if one is not None]
    eos_ids = _end_tokens(backend.eos_token_id, len(backend), folders)
    if not eos_ids:
        raise DataError(f"the tokenizer {name!r} has no end-of-sequence token: set eos_token in tokenizer_config.json")
    pad_id = eos_ids[0] if backend.pad_token_id is None else int(backend.pad_token_id)
    return Tokenizer(backend, eos_ids, pad_id)


def run_tokenizer(model: ModelConfig) -> Tokenizer:
    """The tokenizer of a run, with the end tokens of its model. Raises DataError."""
    return load_tokenizer(model.tokenizer_folder, model.path)


def _end_tokens(own: int | None, vocab_size: int, folders: Sequence[Path]) -> tuple[int, ...]:
    """The tokenizer's end token, then those of the first generation_config.json: chat models often end turns with
    another one. Only one file is read, as checkpoints and exports hold one: theirs have these end tokens again."""
    ids = [] if own is None else [own]
    file = next((file for folder in folders if (file := folder / "generation_config.json").is_file()), None)
    if file is not None:
        try:
            more = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except json.JSONDecodeError as error:
            raise DataError(f"{file}:{error.lineno}: not JSON: {error.msg}") from error
        named = [more] if isinstance(more, int) else (more or [])
        foreign = [token for token in named if token >= vocab_size]
        if foreign:
            _log.warning(
                "%s: the end tokens %s are left out: the tokenizer's vocabulary ends at %d", file, foreign,
                vocab_size - 1,
            )  # fmt: skip
        ids += [token for token in named if token < vocab_size]
    return tuple(dict.fromkeys(ids))
