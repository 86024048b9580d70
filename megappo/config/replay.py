"""Section `replay`: sequences of earlier steps, or of preference pairs, as off-policy experience."""

from typing import Literal

from pydantic import Field

from megappo.config.base import Section


class ReplayConfig(Section):
    """The replay buffer, drawn from with PF-PPO's policy filtration."""

    size: int = Field(0, ge=0)
    """Sequences that the buffer holds at most, the oldest leave first; 0 is no buffer."""
    fraction: float = Field(0.5, gt=0, le=1)
    """Share of a step's sequences that draws from the buffer, or from `pairs`, replace in training. 1 with a buffer of
    one step's sequences is PF-PPO as published."""
    filtration: Literal["uniform", "power", "max_min", "max_random"] = "power"
    """Weights of the draws: all alike; |score|^`power`; the best and the worst of a group alone; 0.4 for the best of a
    group and 0.1 for its others."""
    power: float = Field(2.0, gt=0)
    """Exponent of filtration `power`."""
    pairs: tuple[str, ...] = ()
    """Files of preference pairs (columns as in section `data`), drawn from evenly instead of a buffer. The importance
    ratio of their responses is taken to the starting policy, their reward is that of `reward.parts`."""
    storage: Literal["memory", "disk"] = "memory"
    """Where the sequences are kept: `disk` is a file a rank under `trainer.run_dir`, with `size` records."""
