"""Section `rollout.multi_turn`: an environment answers the model's turns."""

from pydantic import Field

from megappo.config.base import Section


class MultiTurnConfig(Section):
    """Responses of several turns, with tokens of an environment between them that carry no loss."""

    enable: bool = False
    """Ask the environment after each of the model's turns."""
    environment: str | None = None
    """`module:class` of the environment; megappo's own is `megappo.environments.calculator:Calculator`."""
    max_turns: int = Field(8, ge=1)
    """Turns of the model in a response at most."""
    max_tokens_per_turn: int | None = Field(None, ge=1)
    """Tokens of one turn of the model at most; null leaves it to `data.max_response_length`, which counts all turns and
    answers."""
    timeout_seconds: float = Field(30.0, gt=0)
    """An answer of the environment that takes longer ends its sequence, and counts as an error."""
