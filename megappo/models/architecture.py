"""A Hugging Face folder's architecture, and whether a layout can hold it. Imports no torch, reads no weights."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megappo.config.checkpoint_names import readable
from megappo.config.layout import LayoutConfig
from megappo.config.pipeline import EVEN
from megappo.errors import ConfigError, DataError
from megappo.models.families import FAMILIES
from megappo.models.families.base import Family, ModelShape


@dataclass(frozen=True)
class ModelSpec:
    """A model as its Hugging Face folder describes it."""

    family: Family
    shape: ModelShape
    folder: Path
    hf_config: dict[str, Any]


def read_model(folder: str | Path) -> ModelSpec:
    """Reads `folder/config.json`. DataError where there is none, ConfigError for a model that megappo can't build."""
    folder = Path(folder)
    file = readable(folder) / "config.json"
    if not file.is_file():
        reason = "there is no config.json in it" if folder.is_dir() else "there is no such folder"
        raise DataError(f"{folder}: {reason}; give the path of a Hugging Face model folder")
    try:
        config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise DataError(
            f"{file}:{error.lineno}: not JSON ({error.msg}); copy the file again from its source"
        ) from error
    model_type = config.get("model_type")
    family = FAMILIES.get(model_type)
    if family is None:
        raise ConfigError(f"{file}: model_type is {model_type!r}; supported: {', '.join(sorted(FAMILIES))}")
    try:
        shape = family.shape(config)
    except ConfigError as error:
        raise ConfigError(str(error).replace("config.json", str(file), 1)) from error
    return ModelSpec(family, shape, folder, config)


def check_layout(shape: ModelShape, layout: LayoutConfig) -> None:
    """ConfigError, with the sizes that would do, where tp, pp, ep or etp does not divide the model."""
    if not _tp_fits(shape, layout.tp):
        valid = [str(tp) for tp in range(1, shape.num_heads + 1) if _tp_fits(shape, tp)]
        rows = " and ".join(map(str, _ffn_sizes(shape))) or "no"
        raise ConfigError(
            f"layout.tp: {layout.tp} does not divide this model's {shape.num_heads} attention heads, "
            f"{shape.num_kv_heads} KV heads (or is no multiple of them) and "
            f"{rows} feed-forward rows; possible: {', '.join(valid)}"
        )
    if layout.split != EVEN and layout.split.stages(shape.num_layers, layout.num_stages) is None:
        raise ConfigError(
            f"layout: the {shape.num_layers} layers of this model can't be split over {layout.num_stages} stages with "
            f"{layout.split}; leave out what makes the stages unequal"
        )
    if layout.split == EVEN and shape.num_layers % layout.pp:
        valid = [str(pp) for pp in range(1, shape.num_layers + 1) if shape.num_layers % pp == 0]
        raise ConfigError(
            f"layout.pp: {layout.pp} does not divide this model's {shape.num_layers} layers; "
            f"possible: {', '.join(valid)}"
        )
    if layout.split == EVEN and shape.num_layers % layout.num_stages:
        most = shape.num_layers // layout.pp
        valid = [str(vpp) for vpp in range(1, most + 1) if most % vpp == 0]
        raise ConfigError(
            f"layout.vpp: {layout.vpp} does not divide the {most} layers that each of pp {layout.pp} ranks has of this "
            f"model; possible: {', '.join(valid)}"
        )
    if shape.moe is not None:
        for name, size, parts, total in (
            ("ep", layout.ep, "experts", shape.moe.num_experts),
            ("etp", layout.expert_tp, "rows of an expert", shape.moe.ffn_size),
        ):
            if total % size:
                valid = [str(divisor) for divisor in range(1, total + 1) if total % divisor == 0]
                raise ConfigError(
                    f"layout.{name}: {size} does not divide this model's {total} {parts}; possible: {', '.join(valid)}"
                )


def check_exchanged_heads(shape: ModelShape, ranks: int) -> None:
    """ConfigError where the tp · cp `ranks` that exchange tokens for heads would not get whole ones."""
    if shape.num_heads % ranks or shape.num_kv_heads % ranks:
        raise ConfigError(
            f"model.cp_comm_type: a2a gives each of tp · cp = {ranks} ranks whole heads, and a model of this run has "
            f"{shape.num_heads} attention heads and {shape.num_kv_heads} KV heads; set it to all_gather"
        )


def _ffn_sizes(shape: ModelShape) -> list[int]:
    """Feed-forward rows that are cut over the TP ranks: of dense layers, and of a shared expert."""
    if shape.moe is None:
        return [shape.ffn_size]
    dense = [shape.ffn_size] if shape.moe.dense_layers else []
    return dense + ([shape.moe.shared_ffn_size] if shape.moe.shared_ffn_size else [])


def _tp_fits(shape: ModelShape, tp: int) -> bool:
    kv_fits = shape.num_kv_heads % tp == 0 or tp % shape.num_kv_heads == 0
    return shape.num_heads % tp == 0 and kv_fits and all(size % tp == 0 for size in _ffn_sizes(shape))
