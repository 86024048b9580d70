"""Qwen1.5 and Qwen2 with experts (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B). Imports no torch."""

from dataclasses import dataclass, replace

from megappo.models.families.base import HFConfig, ModelShape, read_shape, refuse_unless, required
from megappo.models.families.decoder import decoder_weight_map
from megappo.models.families.experts import experts_mlp, read_experts
from megappo.models.weight_map import Head, WeightMap


@dataclass(frozen=True)
class Qwen2Moe:
    """Qwen2's attention, routed experts, and a shared expert behind a sigmoid gate."""

    model_type: str = "qwen2_moe"
    value_architecture: str = "Qwen2MoeForSequenceClassification"

    def shape(self, config: HFConfig) -> ModelShape:
        refuse_unless(config, "use_sliding_window", False)
        qkv_bias = config.get("qkv_bias", True) is not False
        shape = read_shape(config, qkv_bias=qkv_bias, qk_norm=False, default_tied=False)
        shared = int(required(config, "shared_expert_intermediate_size"))
        return replace(shape, moe=read_experts(config, shared_ffn_size=shared, has_shared_gate=True))

    def weight_map(self, shape: ModelShape, head: Head) -> WeightMap:
        return decoder_weight_map(shape, head, mlp=experts_mlp)
