"""Phi-3 and Phi-4 (14B), which have one model type. Imports no torch.

Longer contexts by `longrope` (Phi-3-128k, Phi-4-mini) are refused: its frequencies depend on the length of a sequence.
"""

from dataclasses import dataclass, replace

from megappo.models.families.base import (
    HFConfig,
    ModelShape,
    read_rotary_percent,
    read_shape,
    refuse_unless,
    window_of,
)
from megappo.models.families.decoder import decoder_weight_map, fused_gate_up_mlp, fused_qkv_attention
from megappo.models.weight_map import Head, WeightMap


@dataclass(frozen=True)
class Phi3:
    """No biases; q, k and v are one tensor, gate and up another; all layers have the window, where there is one."""

    model_type: str = "phi3"
    value_architecture: str = "Phi3ForSequenceClassification"

    def shape(self, config: HFConfig) -> ModelShape:
        """Sizes from `config.json`. Raises ConfigError for dropout, and for what `read_shape` refuses."""
        for dropout in ("resid_pdrop", "embd_pdrop"):
            refuse_unless(config, dropout, 0.0)
        shape = read_shape(config, qkv_bias=False, qk_norm=False, default_tied=False)
        return replace(
            shape,
            rotary_percent=read_rotary_percent(config, default=1.0),
            window=window_of(config),
            local_layers=frozenset(range(shape.num_layers)),
        )

    def weight_map(self, shape: ModelShape, head: Head) -> WeightMap:
        return decoder_weight_map(shape, head, attention=fused_qkv_attention, mlp=fused_gate_up_mlp)
