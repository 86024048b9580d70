"""Section `observe`: what a run shows and writes about itself."""

from pydantic import Field

from megappo.config.base import Section


class ObserveConfig(Section):
    """Console, trackers and samples; `metrics.jsonl` is always written."""

    console: bool = True
    """Print a line a step."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    samples_freq: int = Field(10, ge=0)
    """Steps between files of rollouts; 0 writes none."""
    samples_per_step: int = Field(64, ge=1)
    """Rollouts written to such a file at most."""
