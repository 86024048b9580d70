"""Multi-head latent attention on Megatron's local layers: every TP rank holds the down projections whole.

Megatron cuts their rows over the TP ranks there and gathers the outputs (0.16.1); with Transformer Engine it keeps them
whole, as the weight map has them.
"""

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

from typing import Any

import torch
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional

assert hasattr(multi_latent_attention, "HAVE_TE"), "megatron-core names its test for Transformer Engine otherwise"
if not runtime.has_transformer_engine():
    # It takes Megatron's own wrappers for Transformer Engine, and asks for a class that is None then (0.16.1).
    multi_latent_attention.HAVE_TE = False


class WholeLinear(nn.Module):
    """hidden @ weightᵀ on this rank's part of the sequence; its gradient is summed over the TP ranks with the rest."""

    def __init__(self, columns: int, rows: int, config: TransformerConfig) -> None:
        super().__init__()
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return functional.linear(hidden, self.weight), None


class SpecifiedLatentAttention(MLASelfAttention):
    """Megatron's, made of the modules that its specification names.

    megatron-core 0.19 would exchange some for others, after `qk_layernorm` of the configuration: with queries that are
    not compressed it norms them, which DeepSeek-V2-Lite does not, or it norms neither them nor keys and values.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class LatentAttention(SpecifiedLatentAttention):
    """With whole down projections."""

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        rows = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = WholeLinear(config.hidden_size, rows, config)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config.hidden_size, config.q_lora_rank, config)
