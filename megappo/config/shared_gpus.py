"""How many ranks may compute on one GPU: read by who starts ranks, without torch, and by the ranks."""

import os

from megappo.errors import ConfigError

RANKS_PER_GPU = "MEGAPPO_RANKS_PER_GPU"
"""Environment variable: how many ranks may compute on one GPU, 1 where it is not set."""


def ranks_per_gpu() -> int:
    """Raises ConfigError where the variable is no positive number."""
    text = os.environ.get(RANKS_PER_GPU, "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{RANKS_PER_GPU}: {text!r} is no number of ranks; set it to 1 or more, or leave it out")
    return int(text)
