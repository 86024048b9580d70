"""Gemma 2, and what Gemma 3 shares with it. Imports no torch."""

import math
from dataclasses import dataclass, replace

from megappo.errors import ConfigError
from megappo.models.families.base import HFConfig, ModelShape, read_shape, refuse_unless, required, window_of
from megappo.models.families.decoder import NormNames, decoder_weight_map
from megappo.models.weight_map import Head, WeightMap

GEMMA_NORMS = NormNames(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def gemma_shape(config: HFConfig, *, local_layers: frozenset[int], qk_norm: bool) -> ModelShape:
    """The shape from the keys that Gemma 2 and 3 share; `local_layers` are those with the window."""
    # The configuration classes' values where config.json has none.
    config = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096, "rms_norm_eps": 1e-6, **config}
    refuse_unless(config, "hidden_activation", "gelu_pytorch_tanh")
    refuse_unless(config, "attention_bias", False)
    refuse_unless(config, "use_bidirectional_attention", False)
    # `hidden_act`, which old files have too, is not read by Hugging Face's model.
    read = {key: value for key, value in config.items() if key != "hidden_act"}
    return replace(
        read_shape(read, qkv_bias=False, qk_norm=qk_norm, default_tied=True),
        activation="gelu_tanh",
        local_layers=local_layers,
        window=window_of(config),
        softmax_scale=float(required(config, "query_pre_attn_scalar")) ** -0.5,
        logit_softcap=config.get("final_logit_softcapping"),
        embedding_scale=math.sqrt(int(required(config, "hidden_size"))),
        zero_centered_norms=True,
        residual_norms=True,
    )


def sliding_layers(config: HFConfig, default_pattern: int) -> frozenset[int]:
    """Layers of `layer_types` "sliding_attention"; without that key, all but every `default_pattern`-th."""
    num_layers = int(required(config, "num_hidden_layers"))
    kinds = config.get("layer_types")
    if kinds is None:
        return frozenset(layer for layer in range(num_layers) if (layer + 1) % default_pattern)
    names = set(kinds)
    if len(kinds) != num_layers or not names <= {"sliding_attention", "full_attention"}:
        raise ConfigError(
            f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers, {', '.join(sorted(names))}; "
            "supported: for each layer one of 'sliding_attention' and 'full_attention'"
        )
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")


@dataclass(frozen=True)
class Gemma2:
    """Soft caps on attention scores and logits, a window in every second layer, norms before and behind both parts."""

    model_type: str = "gemma2"
    value_architecture: str = "Gemma2ForSequenceClassification"

    def shape(self, config: HFConfig) -> ModelShape:
        config = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **config}
        shape = gemma_shape(config, local_layers=sliding_layers(config, default_pattern=2), qk_norm=False)
        return replace(shape, attention_softcap=config["attn_logit_softcapping"])

    def weight_map(self, shape: ModelShape, head: Head) -> WeightMap:
        return decoder_weight_map(shape, head, norms=GEMMA_NORMS)
