"""The layers that a model is built of: Transformer Engine's, or Megatron's with the torch layers of `layers.py`."""

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

from dataclasses import replace
from typing import Literal

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megappo.errors import ConfigError
from megappo.models.layers import CoreAttention, RMSNorm

Layers = Literal["auto", "te", "torch"]


def block_spec(layers: Layers, *, num_layers: int, qk_norm: bool) -> TransformerBlockSubmodules:
    """The decoder block of this stage's `num_layers` dense layers; ConfigError where "te" is asked for and missing."""
    if layers == "te" and not runtime.has_transformer_engine():
        raise ConfigError("model.layers: 'te', but Transformer Engine or a GPU is missing here; use 'auto' or 'torch'")
    if layers == "torch" or not runtime.has_transformer_engine():
        layer = _torch_layer(qk_norm)
        return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
    from megatron.core.extensions.transformer_engine import TENorm  # cannot be imported without Transformer Engine

    layer = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk_norm)
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=TENorm)


def _torch_layer(qk_norm: bool) -> ModuleSpec:
    """Megatron's local layer with norms and core attention exchanged."""
    spec = get_gpt_layer_local_spec(qk_layernorm=qk_norm, normalization="RMSNorm")
    layer = spec.submodules
    attention = layer.self_attention
    norm = RMSNorm if qk_norm else IdentityOp
    attention = replace(
        attention,
        submodules=replace(attention.submodules, core_attention=CoreAttention, q_layernorm=norm, k_layernorm=norm),
    )
    layer = replace(layer, input_layernorm=RMSNorm, pre_mlp_layernorm=RMSNorm, self_attention=attention)
    return replace(spec, submodules=layer)
