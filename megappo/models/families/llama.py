"""Llama 2, 3, 3.1, 3.2 and models of their shape (SmolLM2, TinyLlama). Imports no torch."""

from dataclasses import dataclass

from megappo.models.families.base import HFConfig, ModelShape, read_shape, refuse_unless
from megappo.models.families.decoder import decoder_weight_map
from megappo.models.weight_map import Head, WeightMap


@dataclass(frozen=True)
class Llama:
    """No biases, no q/k norm."""

    model_type: str = "llama"
    value_architecture: str = "LlamaForSequenceClassification"

    def shape(self, config: HFConfig) -> ModelShape:
        refuse_unless(config, "attention_bias", False)
        refuse_unless(config, "mlp_bias", False)
        return read_shape(config, qkv_bias=False, qk_norm=False, default_tied=False)

    def weight_map(self, shape: ModelShape, head: Head) -> WeightMap:
        return decoder_weight_map(shape, head)
