"""Qwen2 and Qwen2.5, dense. Imports no torch."""

from dataclasses import dataclass

from megappo.models.families.base import HFConfig, ModelShape, read_shape, refuse_unless
from megappo.models.families.decoder import decoder_weight_map
from megappo.models.weight_map import Head, WeightMap


@dataclass(frozen=True)
class Qwen2:
    """Biases on q, k and v, always."""

    model_type: str = "qwen2"
    value_architecture: str = "Qwen2ForSequenceClassification"

    def shape(self, config: HFConfig) -> ModelShape:
        refuse_unless(config, "use_sliding_window", False)
        return read_shape(config, qkv_bias=True, qk_norm=False, default_tied=False)

    def weight_map(self, shape: ModelShape, head: Head) -> WeightMap:
        return decoder_weight_map(shape, head)
