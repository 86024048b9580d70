"""Section `hybrid`: how weights get from the training shards to the generation engine, and how that is checked."""

from typing import Literal

from pydantic import Field

from megappo.config.base import Section

CHECK_LIMITS = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest mean difference by the model's type, where none is configured. Rounding alone makes about 1e-6 in float32,
and 0.025 in bfloat16 (vLLM against Megatron, random weights)."""


class HybridConfig(Section):
    """The switch between training and generation: docs/hybrid-engine.md."""

    weights: Literal["auto", "direct", "load"] = "auto"
    """How vLLM gets them: `direct` binds and fills its parameters from the shards, `load` streams whole tensors through
    its loader, `auto` is direct where that can be. The native engine always does the first."""
    bucket_mib: int = Field(256, ge=1)
    """Most MiB that any rank receives and sends at once in a transfer, which goes in buckets; memory is taken for two
    buckets at most, the one under way and the next."""
    check_every: int = Field(10, ge=0)
    """Steps between checks of the switched weights by log-probs; the first switch is always checked, 0 checks no
    other."""
    check_limit: float | None = Field(None, gt=0)
    """Largest mean |difference| of log-probs between engine and trainer in a check, in nats; null is 0.001 for float32
    and 0.1 for bfloat16."""

    @property
    def bucket_bytes(self) -> int:
        return self.bucket_mib * 2**20
