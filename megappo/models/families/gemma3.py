"""Gemma 3, the text models (270M, 1B, and the text part of others saved alone). Imports no torch."""

from dataclasses import dataclass, replace
from typing import Any

from megappo.errors import ConfigError
from megappo.models.families.base import HFConfig, ModelShape, read_rope, refuse_unless, rope_keys
from megappo.models.families.decoder import decoder_weight_map
from megappo.models.families.gemma2 import GEMMA_NORMS, gemma_shape, sliding_layers
from megappo.models.weight_map import Head, WeightMap


def _ropes(config: HFConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """RoPE of full and of sliding layers as two configurations, from transformers 5's nested parameters or from the
    keys before it, of which `rope_scaling` is for full layers alone."""
    nested = config.get("rope_parameters") or {}
    full = {"rope_theta": config.get("rope_theta") or 1_000_000.0}
    local = {"rope_theta": config.get("rope_local_base_freq") or 10_000.0}
    full |= rope_keys({**config, "rope_parameters": nested.get("full_attention")})
    local |= nested.get("sliding_attention") or {}
    return {"rope_parameters": full}, {"rope_parameters": local}


@dataclass(frozen=True)
class Gemma3Text:
    """Norms before and behind both parts and on q and k; five of six layers have a window and a RoPE of their own."""

    model_type: str = "gemma3_text"
    value_architecture: str = "Gemma3TextForSequenceClassification"

    def shape(self, config: HFConfig) -> ModelShape:
        refuse_unless(config, "attn_logit_softcapping", None)
        full, local = _ropes(config)
        local_theta, scaling = read_rope(local)
        if scaling is not None:
            raise ConfigError("config.json: RoPE scaling of sliding layers is not supported; supported: 'default'")
        layers = sliding_layers(config, default_pattern=int(config.get("sliding_window_pattern") or 6))
        shape = gemma_shape({**config, "rope_scaling": None, **full}, local_layers=layers, qk_norm=True)
        return replace(shape, local_rope_theta=local_theta)

    def weight_map(self, shape: ModelShape, head: Head) -> WeightMap:
        return decoder_weight_map(shape, head, norms=GEMMA_NORMS)
