"""This rank's shard → Hugging Face folder, one parameter at a time: no rank ever holds the whole model.

The first TP rank of each pipeline stage gathers its stage's parameters and writes its own files, and so does the first
expert TP rank of each EP rank with its experts; the world's first rank joins them under one index. Only the first copy
of each parameter takes part in the gathering.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megappo.models.architecture import ModelSpec
from megappo.models.attach_lora import Merge
from megappo.models.export_folder import begin_folder, end_folder
from megappo.models.hf_folder import CONFIG, SafetensorsWriter, copy_tokenizer, dtype_name, write_index
from megappo.models.import_hf import head_of
from megappo.models.sharded import whole_parameters
from megappo.models.stage_parameters import StageParameter, stage_parameters
from megappo.models.weight_map import Head, Rule, WeightMap
from megappo.parallel.collectives import broadcast_object, gather_objects
from megappo.parallel.mesh import Mesh

DEFAULT_MAX_SHARD_BYTES = 4 * 2**30


@torch.no_grad()
def export_hf(
    model: nn.Module,
    spec: ModelSpec,
    mesh: Mesh,
    out_folder: str | Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    tokenizer_folder: Path | None = None,
    replaces: bool = False,
) -> None:
    """Writes the model to `out_folder` as safetensors of at most `max_shard_bytes`, with configuration and tokenizer,
    which is that of `spec.folder` unless another folder is given.

    Every rank of the mesh calls it. `dtype` converts; None keeps the model's. A value model is written with
    `score.weight`, as a Hugging Face sequence classifier with one label. Padding and second copies of tied tensors are
    left out. The folder appears only when complete. Raises DataError, on every rank, where it exists and is not empty,
    unless the export `replaces` it.
    """
    out = Path(out_folder)
    partial = begin_folder(out, mesh, replaces=replaces)
    head = agreed_head(model, mesh)
    weight_map = spec.family.weight_map(spec.shape, head)
    writer = SafetensorsWriter(partial, part=mesh.pp_rank * mesh.ep + mesh.ep_rank, max_shard_bytes=max_shard_bytes)
    with whole_parameters(model):
        for name, tensor in _tensors(model, weight_map, mesh):
            writer.add(name, tensor if dtype is None else tensor.to(dtype))
        writer.flush()
        own_dtype = next(model.parameters()).dtype
    parts = gather_objects((writer.file_of, writer.num_bytes), mesh.world_group)
    if mesh.is_writer:
        file_of = {name: file for files, _ in parts for name, file in files.items()}
        assert set(file_of) == set(weight_map.tensors), "an export writes every tensor of the weight map, once"
        write_index(partial, file_of, sum(num_bytes for _, num_bytes in parts))
        copy_tokenizer(spec.folder, partial, tokenizer_folder)
    end_folder(out, mesh, CONFIG, _config(spec, head, dtype or own_dtype))


def agreed_head(model: nn.Module, mesh: Mesh) -> Head:
    """The head is on the last stage alone, the writer of the configuration on the first."""
    return broadcast_object(head_of(model), mesh.pp_group, mesh.last_stage_rank)


def _tensors(model: nn.Module, weight_map: WeightMap, mesh: Mesh) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face tensors that this rank writes, on the CPU; adapters are merged into theirs."""
    merge = Merge(model)
    for parameter in stage_parameters(model, weight_map):
        if parameter.rule.is_copy:
            continue
        shards = gathered(parameter, mesh, merge)
        if shards:
            yield from assembled(parameter.rule, shards, weight_map)


def gathered(parameter: StageParameter, mesh: Mesh, merge: Merge) -> list[Tensor]:
    """The shards of all (expert) TP ranks on the first of them (one where each holds the whole); empty elsewhere."""
    copy, group = _copy_and_group(parameter, mesh)
    if copy != 0:
        return []
    if parameter.rule.axis is None or group.size() == 1:
        tensor = merge(parameter)
        return [tensor] if group.rank() == 0 else []
    shard = merge(parameter).contiguous()
    shards = [torch.empty_like(shard) for _ in range(group.size())] if group.rank() == 0 else []
    dist.gather(shard, shards or None, group=group, group_dst=0)
    return shards


def is_gathered_here(parameter: StageParameter, mesh: Mesh) -> bool:
    """Whether this rank is the one that `gathered` gives the shards."""
    copy, group = _copy_and_group(parameter, mesh)
    return copy == 0 and group.rank() == 0


def _copy_and_group(parameter: StageParameter, mesh: Mesh) -> tuple[int, ProcessGroup]:
    """Which copy of the parameter this rank holds a shard of, and the ranks that hold the other shards of it."""
    if parameter.expert is None:
        return mesh.copy_rank, mesh.tp_group
    return mesh.expert_dp_rank, mesh.etp_group


def assembled(
    rule: Rule, shards: Sequence[Tensor], weight_map: WeightMap, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """The Hugging Face tensors that a parameter is made of, from all TP ranks' shards: the inverse of an import."""
    axis = rule.axis or 0
    tensors = {
        name: torch.empty(weight_map.tensors[name], dtype=shards[0].dtype, device=device) for name in rule.sources
    }
    filled = dict.fromkeys(tensors, 0)
    for tp_rank, shard in enumerate(shards):
        offset = 0
        for segment in rule.shard(len(shards), tp_rank):
            if segment.source is not None:
                rows = tensors[segment.source].narrow(axis, segment.start, segment.length)
                rows.copy_(shard.narrow(axis, offset, segment.length))
                filled[segment.source] += segment.length
            offset += segment.length
    for name, tensor in tensors.items():
        assert filled[name] == tensor.shape[axis], (
            f"{filled[name]} of {tensor.shape[axis]} rows of {name} were exported"
        )
        yield name, tensor


def _config(spec: ModelSpec, head: Head, dtype: torch.dtype) -> dict[str, Any]:
    """The model's config.json, with the type and head that are written."""
    config = dict(spec.hf_config)
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype_name(dtype)
    if head == "value":
        config["architectures"] = [spec.family.value_architecture]
        config |= {"num_labels": 1, "id2label": {"0": "VALUE"}, "label2id": {"VALUE": 0}}
    return config
