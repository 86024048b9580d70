"""What the cross-checks need to know of a Hugging Face folder, read from its config.json without torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megappo.config.checkpoint_names import MANIFEST, readable

FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "mistral", "phi3",
    "glm", "glm4", "gemma2", "gemma3_text",
)  # fmt: skip
"""`model_type`s that megappo builds."""

EXPERT_ROWS = {
    "qwen2_moe": "moe_intermediate_size", "qwen3_moe": "moe_intermediate_size", "mixtral": "intermediate_size",
    "deepseek_v2": "moe_intermediate_size", "deepseek_v3": "moe_intermediate_size",
}  # fmt: skip
"""Of families with experts, the key of their rows."""

KV_HEADS = {
    "qwen2": 32, "qwen3": 32, "qwen2_moe": 16, "qwen3_moe": 4, "mixtral": 8, "mistral": 8, "glm": 2, "glm4": 2,
    "gemma2": 4, "gemma3_text": 4,
}  # fmt: skip
"""`num_key_value_heads` of the families' configuration classes (transformers 5.19), which a config.json without that
key means. The other families have one for each attention head there."""

ROUTER_BIAS = ("deepseek_v3",)
"""Families whose routers add a bias of each expert when they choose."""


ADAPTERS = "adapter_config.json"
"""What PEFT's folders have, which hold adapters without their model."""


class ModelFolderError(Exception):
    """The folder is no model that megappo can build; holds the reason and the way out."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy


@dataclass(frozen=True)
class ModelFacts:
    """Sizes that a layout has to divide, the positions that the model was made for, what its checkpoints must share."""

    model_type: str
    num_heads: int
    num_kv_heads: int
    num_layers: int
    max_positions: int | None
    hidden_size: int | None = None
    vocab_size: int | None = None
    num_experts: int | None = None
    """None for a dense model."""
    expert_rows: int | None = None
    """Feed-forward rows of one expert."""

    @property
    def has_router_bias(self) -> bool:
        """Whether its routers add a bias of each expert when they choose."""
        return self.model_type in ROUTER_BIAS

    def tp_fits(self, tp: int) -> bool:
        """Whether `tp` ranks can share the heads: equal query heads each, and whole KV heads or equal parts of one."""
        shares_kv = self.num_kv_heads % tp == 0 or tp % self.num_kv_heads == 0
        return self.num_heads % tp == 0 and shares_kv

    def heads_fit(self, ranks: int) -> bool:
        """Whether each of so many ranks gets whole query heads and whole KV heads."""
        return self.num_heads % ranks == 0 and self.num_kv_heads % ranks == 0


def default_kv_heads(config: Mapping[str, Any], num_heads: int) -> int:
    """The KV heads that a config.json means which gives no number of them; null is one for each attention head."""
    if "num_key_value_heads" in config:
        return num_heads
    return KV_HEADS.get(str(config.get("model_type")), num_heads)


def read_model_facts(folder: str) -> ModelFacts:
    """The facts of a Hugging Face folder; raises ModelFolderError where there is no model of a known family."""
    path = readable(folder)
    if not path.is_dir():
        raise ModelFolderError("there is no such folder", "give a Hugging Face folder with config.json and safetensors")
    file = path / "config.json"
    if not file.is_file() and (path / ADAPTERS).is_file():
        raise ModelFolderError(
            "the folder holds low-rank adapters alone, and no model",
            "give a whole model: megappo convert --merged writes it from the run's checkpoint, and "
            "model.lora.export_merged at the end of a run",
        )
    if not file.is_file() and (path / MANIFEST).is_file():
        raise ModelFolderError(
            "the folder is a checkpoint, and no Hugging Face folder",
            f"megappo convert --from {folder} --to FOLDER writes it as one",
        )
    if not file.is_file():
        raise ModelFolderError("the folder has no config.json", "give a folder that save_pretrained has written")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelFolderError(f"its config.json is not JSON ({error})", "export the model again") from None
    model_type = config.get("model_type") if isinstance(config, dict) else None
    if model_type not in FAMILIES:
        raise ModelFolderError(
            f"its config.json has model_type {model_type!r}, which megappo does not build",
            f"the families are {', '.join(FAMILIES)}",
        )
    num_heads = _size(config, "num_attention_heads")
    rows_key = EXPERT_ROWS.get(model_type)
    has_experts = rows_key is not None
    # transformers 5 renames the number of experts of Qwen3-MoE on saving.
    keys = ("num_experts", "n_routed_experts")
    experts_key = next((key for key in keys if config.get(key) is not None), "num_local_experts")
    return ModelFacts(
        model_type=model_type,
        num_heads=num_heads,
        num_kv_heads=_size(config, "num_key_value_heads", default=default_kv_heads(config, num_heads)),
        num_layers=_size(config, "num_hidden_layers"),
        max_positions=config.get("max_position_embeddings"),
        hidden_size=config.get("hidden_size"),
        vocab_size=config.get("vocab_size"),
        num_experts=_size(config, experts_key) if has_experts else None,
        expert_rows=_size(config, rows_key) if rows_key is not None else None,
    )


def _size(config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or value < 1:
        raise ModelFolderError(f"its config.json has {key} {value!r}", "export the model again")
    return value
