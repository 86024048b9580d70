"""A prompt and a response as a reward model reads them: rendered and tokenised anew, with its own template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from megappo.data.tokenizer import Message, Tokenizer
from megappo.errors import ConfigError, DataError
from megappo.experience.sample import Prompt


class ConversationEncoder:
    """Token ids of whole conversations.

    With a chat template: the prompt's turns and the response as the assistant's turn, closed as the template closes it.
    Without: the turns' texts, one under the other, the response directly after them, and the end token where the
    response is complete.
    """

    def __init__(self, tokenizer: Tokenizer, apply_chat_template: bool | None, setting: str) -> None:
        """`setting` is the YAML path of `apply_chat_template`, for the error where there is no template to apply."""
        self._tokenizer = tokenizer
        self._chat = tokenizer.has_chat_template if apply_chat_template is None else apply_chat_template
        if self._chat and not tokenizer.has_chat_template:
            raise ConfigError(
                f"{setting}: true, but the tokenizer has no chat template; set it to null or false, or use a tokenizer "
                "folder with chat_template.jinja"
            )

    def encode(
        self, prompts: Sequence[Prompt], responses: Sequence[str], are_complete: Sequence[bool]
    ) -> list[list[int]]:
        """One sequence a conversation. DataError where the template refuses the turns."""
        texts = [self._text(prompt, response) for prompt, response in zip(prompts, responses, strict=True)]
        encoded = self._tokenizer.encode_batch(texts, add_special_tokens=not self._chat)
        if self._chat:
            return encoded
        return [self._ended(ids, is_complete) for ids, is_complete in zip(encoded, are_complete, strict=True)]

    def _text(self, prompt: Prompt, response: str) -> str:
        if not self._chat:
            return "\n".join(turn.get("content") or "" for turn in prompt.messages) + response
        turns = [cast(Message, dict(turn)) for turn in prompt.messages]
        try:
            return self._tokenizer.render_chat(
                [*turns, Message(role="assistant", content=response)], add_generation_prompt=False
            )
        except DataError as error:
            raise DataError(f"prompt {prompt.index} of {prompt.source}: {error}") from error

    def _ended(self, ids: list[int], is_complete: bool) -> list[int]:
        """Some tokenizers close every text with an end token; here it says that the response is complete."""
        body = ids[:-1] if ids and ids[-1] in self._tokenizer.eos_ids else ids
        return [*body, self._tokenizer.eos_id] if is_complete else body
