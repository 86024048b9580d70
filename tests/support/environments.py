"""Environments of the runs in tests. Imports no torch."""

from megappo.environments.environment import Reply
from megappo.experience.sample import Prompt


class Echo:
    """Answers a turn with its length and the prompt's number; turns end with any small letter. `i` is the end,
    any other vowel an error."""

    stop = tuple("abcdefghijklmnopqrstuvwxyz")

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt

    async def answer(self, turn: str) -> Reply | None:
        if turn.endswith(("a", "e", "o", "u")):
            raise ValueError("no vowel")
        return None if turn.endswith("i") else Reply(f"[{len(turn)}|{self.prompt.index}]")
