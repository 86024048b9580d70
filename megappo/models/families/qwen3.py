"""Qwen3, dense. Imports no torch."""

from dataclasses import dataclass

from megappo.models.families.base import HFConfig, ModelShape, read_shape, refuse_unless
from megappo.models.families.decoder import decoder_weight_map
from megappo.models.weight_map import Head, WeightMap


@dataclass(frozen=True)
class Qwen3:
    """RMSNorm over each head of q and k, a head size of its own, no biases."""

    model_type: str = "qwen3"
    value_architecture: str = "Qwen3ForSequenceClassification"

    def shape(self, config: HFConfig) -> ModelShape:
        refuse_unless(config, "attention_bias", False)
        refuse_unless(config, "use_sliding_window", False)
        # Qwen3's configuration class has 128 where config.json has no head_dim.
        config = {"head_dim": 128, **config}
        return read_shape(config, qkv_bias=False, qk_norm=True, default_tied=False)

    def weight_map(self, shape: ModelShape, head: Head) -> WeightMap:
        return decoder_weight_map(shape, head)
