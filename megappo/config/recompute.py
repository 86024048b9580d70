"""Which activations of a trained model are computed a second time in the backward pass, instead of being kept."""

from dataclasses import dataclass
from typing import Literal

Granularity = Literal["full", "selective"]
Method = Literal["uniform", "block"]
RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "shared_experts"]
"""Those of Megatron's that megappo's layers have; of a layer with experts, `moe` is all of them with their router."""

DEFAULT_MODULES: tuple[RecomputeModule, ...] = ("core_attn",)
"""Megatron's own default."""


@dataclass(frozen=True)
class Recompute:
    """Megatron's settings of that name (`recompute_granularity`, …), resolved; none are kept back with `granularity`
    None."""

    granularity: Granularity | None = None
    method: Method | None = None
    num_layers: int | None = None
    modules: tuple[RecomputeModule, ...] = DEFAULT_MODULES


NO_RECOMPUTE = Recompute()
