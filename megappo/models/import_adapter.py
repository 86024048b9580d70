"""A folder in PEFT's format → this rank's adapters: the way back of `export_adapter.py`."""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from megappo.errors import DataError
from megappo.models.adapter_map import PEFT_PREFIX, adapter_map, adapter_targets
from megappo.models.architecture import ModelSpec
from megappo.models.attach_lora import attached_lora
from megappo.models.fused_adapters import AdapterReader
from megappo.models.hf_folder import SafetensorsReader
from megappo.models.import_hf import fill
from megappo.models.stage_parameters import stage_parameters
from megappo.models.weight_map import Head, Shape
from megappo.parallel.mesh import Mesh


@torch.no_grad()
def import_adapter(model: nn.Module, spec: ModelSpec, mesh: Mesh, folder: str | Path, head: Head, setting: str) -> None:
    """Fills the adapters of `model`, a bare stage, from `folder`; a value head too where the folder has one.

    Raises DataError, naming tensor and shapes, where the folder has other adapters than the model; `setting` is the
    section that they were made by. Adapters of zeros, for projections that have none here, are left out; rows of
    projections without an adapter stay as they are.
    """
    lora = attached_lora(model)
    assert lora is not None, "the model has no adapters"
    base = spec.family.weight_map(spec.shape, head)
    weight_map = adapter_map(base, adapter_targets(base, lora.target_modules, setting), lora, head)
    with AdapterReader(Path(folder), dict(weight_map.tensors), lora.rank) as reader:
        _check_names(reader, weight_map.tensors, setting)
        for parameter in stage_parameters(model, weight_map, is_partial=True):
            if all(name in reader.names or not _is_head(name) for name in parameter.rule.sources):
                fill(parameter, reader, mesh, keeps_padding=True)


def _check_names(reader: SafetensorsReader, expected: Mapping[str, Shape], setting: str) -> None:
    missing = sorted(name for name in expected.keys() - reader.names if not _is_head(name))
    if missing:
        raise DataError(
            f"{reader.folder}: has no {missing[0]}, which {setting}.target_modules asks for; name what the adapters of "
            "the folder are for, as its adapter_config.json does"
        )
    unknown = sorted(name for name in reader.names - expected.keys() if not _is_head(name))
    for name in unknown:
        shape = reader.shape(name)
        if bool(reader.rows(name, 0, 0, shape[0]).any()):
            raise DataError(
                f"{reader.file_of(name)}: {name} has no place in the model; {setting}.target_modules has to name all "
                "that the folder adapts, and the model has to be the adapters' own"
            )
    for name in sorted(expected.keys() & reader.names):
        shape = reader.shape(name)
        if shape != expected[name]:
            raise DataError(
                f"{reader.file_of(name)}: {name} has shape {list(shape)}, the model and {setting} ask for "
                f"{list(expected[name])}; the adapters must be of this model, and {setting}.rank theirs"
            )


def _is_head(name: str) -> bool:
    return name == f"{PEFT_PREFIX}score.weight"
