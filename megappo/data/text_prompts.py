"""Prompts that are kept as text and tokenised when they are asked for (`data.prefetch`)."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Sequence
from typing import overload

from megappo.data.render import PromptRenderer
from megappo.experience.sample import Prompt


class TextPrompts(Sequence[Prompt]):
    """A sequence of prompts without their token ids, which are made again from the text at each look.

    `renderer` is this object's own: several threads may ask, and tokenizers are not made for that. Prompts of `limit`
    tokens may have been cut, and a cut text can have other tokens: they keep theirs.
    """

    def __init__(self, prompts: Iterable[Prompt], renderer: PromptRenderer, limit: int) -> None:
        self._renderer = renderer
        self._one_at_a_time = threading.Lock()
        self._prompts = [
            prompt if len(prompt.token_ids) >= limit else dataclasses.replace(prompt, token_ids=())
            for prompt in prompts
        ]

    def __len__(self) -> int:
        return len(self._prompts)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        prompt = self._prompts[index]
        if prompt.token_ids:
            return prompt
        with self._one_at_a_time:
            (token_ids,) = self._renderer.encode([prompt.text])
        return dataclasses.replace(prompt, token_ids=tuple(token_ids))
