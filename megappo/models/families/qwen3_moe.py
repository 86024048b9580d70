"""Qwen3 with experts (Qwen3-30B-A3B, Qwen3-235B-A22B). Imports no torch."""

from dataclasses import dataclass, replace

from megappo.models.families.base import HFConfig, ModelShape, read_shape, refuse_unless
from megappo.models.families.decoder import decoder_weight_map
from megappo.models.families.experts import experts_mlp, read_experts
from megappo.models.weight_map import Head, WeightMap


@dataclass(frozen=True)
class Qwen3Moe:
    """Qwen3's attention, and routed experts without a shared one."""

    model_type: str = "qwen3_moe"
    value_architecture: str = "Qwen3MoeForSequenceClassification"

    def shape(self, config: HFConfig) -> ModelShape:
        refuse_unless(config, "attention_bias", False)
        refuse_unless(config, "use_sliding_window", False)
        shape = read_shape(config, qkv_bias=False, qk_norm=True, default_tied=False)
        return replace(shape, moe=read_experts(config))

    def weight_map(self, shape: ModelShape, head: Head) -> WeightMap:
        return decoder_weight_map(shape, head, mlp=experts_mlp)
