"""GLM-4: the chat models of 2024 (`glm`) and those of April 2025 (`glm4`). Imports no torch."""

from dataclasses import dataclass, replace

from megappo.models.families.base import HFConfig, ModelShape, read_rotary_percent, read_shape
from megappo.models.families.decoder import NormNames, decoder_weight_map, fused_gate_up_mlp
from megappo.models.weight_map import Head, WeightMap


def _glm_shape(config: HFConfig) -> ModelShape:
    # The configuration classes' values where config.json has none.
    config = {"head_dim": 128, "attention_bias": True, **config}
    shape = read_shape(config, qkv_bias=bool(config["attention_bias"]), qk_norm=False, default_tied=False)
    return replace(shape, rotary_percent=read_rotary_percent(config, default=0.5), rotary_interleaved=True)


@dataclass(frozen=True)
class Glm:
    """Biases on q, k and v; RoPE on half of each head, neighbours together; gate and up are one tensor."""

    model_type: str = "glm"
    value_architecture: str = "GlmForSequenceClassification"

    def shape(self, config: HFConfig) -> ModelShape:
        return _glm_shape(config)

    def weight_map(self, shape: ModelShape, head: Head) -> WeightMap:
        return decoder_weight_map(shape, head, mlp=fused_gate_up_mlp)


@dataclass(frozen=True)
class Glm4:
    """`Glm` with a norm behind attention and one behind the feed-forward part."""

    model_type: str = "glm4"
    value_architecture: str = "Glm4ForSequenceClassification"

    def shape(self, config: HFConfig) -> ModelShape:
        return replace(_glm_shape(config), residual_norms=True)

    def weight_map(self, shape: ModelShape, head: Head) -> WeightMap:
        norms = NormNames(after_attention="post_self_attn_layernorm", after_mlp="post_mlp_layernorm")
        return decoder_weight_map(shape, head, mlp=fused_gate_up_mlp, norms=norms)
