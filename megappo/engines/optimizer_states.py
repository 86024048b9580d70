"""The types of what the optimizer keeps, as Megatron and Transformer Engine's FusedAdam are told them.

Checkpoints hold all of it in float32, whatever the types, so that a run with other ones goes on from them.
"""

from __future__ import annotations

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

from typing import Any

import torch

from megappo.config.optim import OptimConfig
from megappo.errors import ConfigError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def check_available(optim: OptimConfig, section: str) -> None:
    """ConfigError where Transformer Engine is missing and the optimizer needs it. Torch's AdamW keeps its moments in
    the type of the parameters, and Apex's in float32: there is no other way to these types."""
    if optim.use_precision_aware_optimizer and not runtime.has_transformer_engine():
        raise ConfigError(
            f"{section}.use_precision_aware_optimizer: true, but Transformer Engine or a GPU is missing here; install "
            "transformer-engine 2.1 or later, or set it to false (float32 moments, and float32 copies of bfloat16 "
            f"parameters, cut over the data-parallel ranks by {section}.use_distributed_optimizer)"
        )


def precision_settings(optim: OptimConfig) -> dict[str, Any]:
    """The fields of Megatron's OptimizerConfig that say which types, none where all are float32."""
    if not optim.use_precision_aware_optimizer:
        return {}
    names = ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    return {
        "use_precision_aware_optimizer": True,
        # Megatron's reshardable checkpoints hold float32; of the 16 bits that a bfloat16 parameter lacks, which this
        # would keep in place of the whole, FusedAdam loads int16 alone (megatron-core 0.19.2, Transformer Engine 2.12).
        "store_param_remainders": False,
        **{name: DTYPES[getattr(optim, name)] for name in names},
    }


def create_state(inner: torch.optim.Optimizer) -> None:
    """Makes the state of `inner` before its first step, where loading needs tensors to load into."""
    # Transformer Engine's knows its types; what else stands in its state, a `step` too, it can't save.
    initialize: Any = getattr(inner, "initialize_state", None)
    for param in (param for group in inner.param_groups for param in group["params"]):
        if inner.state[param]:
            continue
        if initialize is not None:
            initialize(param, False)  # whole main parameters, no remainders
        else:
            inner.state[param] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(param),
                "exp_avg_sq": torch.zeros_like(param),
            }
