"""Section `algorithm.filter_groups`: dynamic sampling."""

from typing import Literal

from pydantic import Field

from megappo.config.base import Section


class FilterGroupsConfig(Section):
    """Leaves out prompts whose responses are all worth the same, and samples further prompts in their place (DAPO)."""

    enable: bool = False
    """Train only on groups that differ in `metric`."""
    metric: str = "score"
    """What has to differ: `score`, `acc` (whether every rule part finds a response right), or a reward part's name.
    Every prompt set needs it."""
    max_num_gen_batches: int = Field(10, ge=0)
    """Batches of prompts that a step samples at most; 0 is no limit: such a step may never end."""
    when_short: Literal["error", "fill"] = "error"
    """At that limit with too few groups: stop the run, or fill the batch with groups that don't differ."""
