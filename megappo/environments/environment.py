"""What an environment is: a class of the user's, one object a sequence."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Literal, Protocol

from megappo.experience.sample import Prompt


@dataclass(frozen=True)
class Reply:
    """What an environment says after a turn of the model.

    With a `role`, the reply is a message of that role, and the model answers it in a new message, by the tokenizer's
    chat template. Without one, the text follows the model's as it is, and the model goes on from there.
    """

    text: str
    role: Literal["tool", "user"] | None = None


class Environment(Protocol):
    """One sequence's environment; the class is called with the sequence's prompt.

    A class attribute `stop`, a tuple of strings, names what ends a turn of the model besides its end token and
    `rollout.stop`; the turn's text keeps it, and what else the token holds that completes it (`?\\n` for `?`).
    """

    def __init__(self, prompt: Prompt) -> None: ...

    def answer(self, turn: str) -> Reply | Awaitable[Reply | None] | None:
        """The reply to the model's turn, without its special tokens; None where the sequence is finished.

        May be `async def`. What it raises ends the sequence, and is counted.
        """
        ...
