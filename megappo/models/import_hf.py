"""Hugging Face folder → this rank's shard: every rank reads its own slices and nothing else."""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from pathlib import Path

import torch
from torch import Tensor, nn

from megappo.errors import DataError
from megappo.models.architecture import ModelSpec
from megappo.models.chunks import chunks_of
from megappo.models.families.decoder import SCORE
from megappo.models.heads import ValueHead
from megappo.models.hf_folder import SafetensorsReader
from megappo.models.stage_parameters import StageParameter, stage_parameters
from megappo.models.weight_map import Head, Shape, WeightMap
from megappo.parallel.mesh import Mesh

# Heads that the stage at hand does not have (a tied model's stored copy, a critic made from a language model, a
# classifier's stages before its last), and buffers that old versions of transformers stored.
_IGNORED = ("lm_head.weight", "score.weight", "rotary_emb.inv_freq")


def head_of(model: nn.Module) -> Head:
    """The head that a model was built with; known on the last stage, "lm" on the others."""
    return "value" if isinstance(getattr(chunks_of(model)[-1], "output_layer", None), ValueHead) else "lm"


def is_classifier(folder: str | Path) -> bool:
    """Whether a Hugging Face folder holds a sequence classifier, as reward models are stored: it has `score.weight`."""
    with SafetensorsReader(Path(folder)) as reader:
        return SCORE in reader.names


@torch.no_grad()
def import_hf(model: nn.Module, spec: ModelSpec, mesh: Mesh, folder: str | Path | None = None) -> None:
    """Fills the shard from `folder` (`spec.folder` unless given), converting to the model's dtype.

    A value head is filled from `score.weight` where the folder has it and stays zero otherwise. Raises DataError,
    naming tensor, file and shapes, where a tensor is missing or of another shape, or one that the model has no place
    for is there. A classifier's head is none of these, for stages don't know theirs: whoever asks for a language model
    refuses such a folder (`is_classifier`).
    """
    weight_map = spec.family.weight_map(spec.shape, head_of(model))
    with SafetensorsReader(Path(folder or spec.folder)) as reader:
        _refuse_unknown(reader, weight_map)
        for parameter in stage_parameters(model, weight_map):
            rule = parameter.rule
            if rule.is_optional and not reader.names.issuperset(rule.sources):
                continue
            for source in rule.sources:
                _check_shape(reader, source, weight_map.tensors[source])
            fill(parameter, reader, mesh)


def _refuse_unknown(reader: SafetensorsReader, weight_map: WeightMap) -> None:
    """A tensor that is silently left out here would be missing from the next export."""
    unknown = [name for name in reader.names if name not in weight_map.tensors and not name.endswith(_IGNORED)]
    if unknown:
        predicting = [name for name in unknown if "eh_proj" in name or ".enorm." in name or ".hnorm." in name]
        if predicting:
            raise DataError(
                f"{reader.file_of(predicting[0])}: tensor {predicting[0]} belongs to a multi-token prediction layer, "
                "which is neither trained nor exported; take those layers out of the folder (num_nextn_predict_layers)"
            )
        name = min(unknown)
        raise DataError(
            f"{reader.file_of(name)}: tensor {name} (of {len(unknown)} such) has no place in the model that "
            "config.json describes; weights and config.json must come from the same model"
        )


def _check_shape(reader: SafetensorsReader, name: str, expected: Shape) -> None:
    shape = reader.shape(name)
    if shape != expected:
        raise DataError(
            f"{reader.file_of(name)}: tensor {name} has shape {list(shape)}, config.json asks for {list(expected)}; "
            "weights and config.json must come from the same model"
        )


def fill(parameter: StageParameter, reader: SafetensorsReader, mesh: Mesh, *, keeps_padding: bool = False) -> None:
    """Reads this rank's rows of one parameter. Padding is made zero, or with `keeps_padding` stays as it is."""
    axis = parameter.rule.axis or 0
    offset = 0
    for segment in parameter.shard(mesh):
        rows: Tensor = parameter.tensor.narrow(axis, offset, segment.length)
        if segment.source is not None:
            rows.copy_(reader.rows(segment.source, axis, segment.start, segment.length))
        elif not keeps_padding:
            rows.zero_()
        offset += segment.length
    size = parameter.tensor.shape[axis]
    assert offset == size, f"the weight map fills {offset} of {size} rows of {parameter.name}"
