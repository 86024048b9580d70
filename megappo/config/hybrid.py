"""Section `hybrid`: how weights get from the training shards to the generation engine, and how that is checked."""

from typing import Literal

from pydantic import Field

from megappo.config.base import Section

CHECK_LIMITS = {"float32": 1e-3, "bfloat16": 0.1, "fp8": 0.5}
"""Largest mean difference by the model's type, or that of the rollout's rounded weights, where none is configured.
Rounding alone makes about 1e-6 in float32, and 0.025 in bfloat16 (vLLM against Megatron, random weights). fp8 (E4M3)
has 4 bits fewer than bfloat16: weights and inputs of all linear layers rounded to it make 0.19 to 0.25 in a random
model in which bfloat16 makes 0.02 to 0.03. Weights of another step's are further off: by whole nats there."""


def default_check_limit(dtype: str, quantization: str | None) -> float:
    """The largest mean |difference| of a check's log-probs, in nats, where `hybrid.check_limit` is not set."""
    return CHECK_LIMITS[quantization or dtype]


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
    """Largest mean |difference| of log-probs between engine and trainer in a check, in nats; null is 0.001 for float32,
    0.1 for bfloat16, and 0.5 with `rollout.quantization` fp8."""

    @property
    def bucket_bytes(self) -> int:
        return self.bucket_mib * 2**20
