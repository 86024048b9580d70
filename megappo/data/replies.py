"""An environment's reply as token ids: what stands between one turn of the model and its next."""

from __future__ import annotations

from collections.abc import Sequence

from megappo.data.tokenizer import Message, Tokenizer
from megappo.errors import DataError

TURN = "megappoturn"
"""Stands for the model's turn, to find what a chat template puts after one."""


class ReplyEncoder:
    """Token ids of replies, by the tokenizer's chat template where a reply is a message."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text_ids(self, text: str) -> list[int]:
        """Text that follows the model's own as it is."""
        return self._tokenizer.encode_after(text)

    def message_ids(self, role: str, text: str, turn: Sequence[int]) -> list[int]:
        """What closes the model's turn, a message of `role`, and what opens the model's next turn.

        `turn` are the model's tokens: an end token that it wrote itself is not repeated. Raises DataError where there
        is no chat template, or where it refuses the role.
        """
        if not self._tokenizer.has_chat_template:
            raise DataError(
                f"the environment replies with a message of the role {role!r}, and the tokenizer has no chat template; "
                "reply with Reply(text) alone, or use a tokenizer that has one"
            )
        chat = self._tokenizer.render_chat(
            [
                Message(role="user", content=TURN),
                Message(role="assistant", content=TURN),
                Message(role=role, content=text),
            ]
        )
        first = chat.find(TURN)
        after = chat.find(TURN, first + 1)
        if after < 0:
            raise DataError("the chat template leaves the model's earlier turns out; messages can't follow them")
        ids = self._tokenizer.encode_after(chat[after + len(TURN) :])
        ends = self._tokenizer.eos_ids
        return ids[1:] if ids and ids[0] in ends and turn and turn[-1] in ends else ids
