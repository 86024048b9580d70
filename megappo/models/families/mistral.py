"""Mistral: Llama's layers, with a window where the configuration has one. Imports no torch."""

from dataclasses import dataclass, replace

from megappo.models.families.base import HFConfig, ModelShape, read_shape, refuse_unless, window_of
from megappo.models.families.decoder import decoder_weight_map
from megappo.models.weight_map import Head, WeightMap


@dataclass(frozen=True)
class Mistral:
    """No biases, no q/k norm, a head size of its own; all layers have the window."""

    model_type: str = "mistral"
    value_architecture: str = "MistralForSequenceClassification"

    def shape(self, config: HFConfig) -> ModelShape:
        # The configuration class has a window where config.json says nothing of it, none where it says null.
        config = {"sliding_window": 4096, **config}
        refuse_unless(config, "attention_bias", False)
        refuse_unless(config, "layer_types", None)
        shape = read_shape(config, qkv_bias=False, qk_norm=False, default_tied=False)
        return replace(shape, window=window_of(config), local_layers=frozenset(range(shape.num_layers)))

    def weight_map(self, shape: ModelShape, head: Head) -> WeightMap:
        return decoder_weight_map(shape, head)
