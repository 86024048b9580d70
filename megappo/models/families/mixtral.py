"""Mixtral (8x7B, 8x22B). Imports no torch."""

from dataclasses import dataclass, replace

from megappo.models.families.base import HFConfig, ModelShape, read_shape, read_theta, refuse_unless
from megappo.models.families.decoder import LayerPart, decoder_weight_map
from megappo.models.families.experts import ExpertNames, read_experts, routed_experts
from megappo.models.weight_map import Head, WeightMap

THETA = 1_000_000.0
NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


@dataclass(frozen=True)
class Mixtral:
    """Llama's attention, and routed experts in every layer whose weights sum to 1."""

    model_type: str = "mixtral"
    value_architecture: str = "MixtralForSequenceClassification"

    def shape(self, config: HFConfig) -> ModelShape:
        refuse_unless(config, "sliding_window", None)
        # Where config.json names no theta, Hugging Face's Mixtral has another one than its other families.
        config = {**config, "rope_theta": read_theta(config, default=THETA)}
        shape = read_shape(config, qkv_bias=False, qk_norm=False, default_tied=False)
        return replace(shape, moe=read_experts(config, norm_topk_prob=True, ffn_key="intermediate_size"))

    def weight_map(self, shape: ModelShape, head: Head) -> WeightMap:
        return decoder_weight_map(shape, head, mlp=_experts)


def _experts(shape: ModelShape, layer: int) -> LayerPart:
    return routed_experts(shape, layer, NAMES)
