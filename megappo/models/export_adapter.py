"""This rank's adapters → a folder in PEFT's format: adapter_config.json and adapter_model.safetensors.

Tensor by tensor: the rank that has gathered the shards of one sends it to the world's first rank, which writes it into
the file. No rank holds more than the tensors of a layer that are not yet whole, and one that is on its way.
The whole model with the adapters in it is written by `export_hf.py`.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megappo.config.lora import LoraConfig
from megappo.config.model_folder import ADAPTERS
from megappo.models.adapter_map import (
    PEFT_EXPERTS_GATE_UP,
    AdapterTarget,
    adapter_map,
    adapter_targets,
    missing_expert_tensors,
    peft_targets,
)
from megappo.models.architecture import ModelSpec
from megappo.models.attach_lora import Merge, attached_lora
from megappo.models.export_folder import begin_folder, end_folder
from megappo.models.export_hf import agreed_head, gathered, is_gathered_here
from megappo.models.hf_folder import ADAPTER_WEIGHTS, copy_tokenizer
from megappo.models.stage_parameters import stage_parameters
from megappo.models.tensor_file import TensorFile, as_bytes
from megappo.models.weight_map import Head, Rule, Shape, WeightMap
from megappo.parallel.collectives import gather_objects_at
from megappo.parallel.mesh import Mesh


@torch.no_grad()
def export_adapter(
    model: nn.Module,
    spec: ModelSpec,
    mesh: Mesh,
    out_folder: str | Path,
    tokenizer_folder: Path | None = None,
    replaces: bool = False,
) -> None:
    """Writes the adapters of `model`, a bare stage, to `out_folder`, with the tokenizer, which is that of `spec.folder`
    unless another folder is given; a value head is among them.

    Every rank of the mesh calls it. The folder appears only when complete. Raises DataError, on every rank, where it
    exists and is not empty, unless the export `replaces` it.
    """
    lora = attached_lora(model)
    assert lora is not None, "the model has no adapters"
    out = Path(out_folder)
    partial = begin_folder(out, mesh, replaces=replaces)
    head = agreed_head(model, mesh)
    base = spec.family.weight_map(spec.shape, head)
    targets = adapter_targets(base, lora.target_modules)
    weight_map = adapter_map(base, targets, lora, head)
    plan = gather_objects_at(0, planned_tensors(model, weight_map, mesh), mesh.world_group)
    turns = _completed_tensors(model, weight_map, mesh)
    if mesh.is_writer:
        missing = missing_expert_tensors(base, weight_map, lora.rank)
        _write(partial / ADAPTER_WEIGHTS, list(chain.from_iterable(plan)), turns, weight_map, missing, mesh)
        copy_tokenizer(spec.folder, partial, tokenizer_folder)
    else:
        for tensor in chain.from_iterable(tensors.values() for tensors in turns):
            dist.send(as_bytes(tensor), group=mesh.world_group, group_dst=0)
    # No config.json: the folder is no model, PEFT takes that from the base.
    end_folder(out, mesh, ADAPTERS, peft_config(spec, lora, targets, head))


class Planned(NamedTuple):
    """A tensor of the file, and the `turn` in which rank `sender` has all of it: the place of a parameter in the order
    of the stage, which is the same on all ranks of a stage."""

    turn: int
    sender: int
    name: str
    dtype: torch.dtype


def planned_tensors(model: nn.Module, weight_map: WeightMap, mesh: Mesh) -> list[Planned]:
    """The tensors that `_completed_tensors` gives on this rank, without communication."""
    plan = []
    rows = RowsLeft(weight_map)
    for turn, parameter in enumerate(stage_parameters(model, weight_map, is_partial=True)):
        if is_gathered_here(parameter, mesh):
            plan += [Planned(turn, mesh.rank, name, parameter.tensor.dtype) for name in rows.completed(parameter.rule)]
    return plan


def _completed_tensors(model: nn.Module, weight_map: WeightMap, mesh: Mesh) -> Iterator[dict[str, Tensor]]:
    """For each parameter of the stage the tensors on the CPU that it completes on this rank, often none. All ranks of
    the stage go through it together."""
    merge, rows = Merge(model), RowsLeft(weight_map)
    begun: dict[str, Tensor] = {}
    for parameter in stage_parameters(model, weight_map, is_partial=True):
        shards = gathered(parameter, mesh, merge)
        put_rows(begun, parameter.rule, shards, weight_map)
        yield {name: begun.pop(name) for name in rows.completed(parameter.rule)} if shards else {}
    assert not begun, f"rows of {', '.join(begun)} are in no parameter"


class RowsLeft:
    """Counts the rows (or columns) that each tensor lacks: one may be in several parameters."""

    def __init__(self, weight_map: WeightMap) -> None:
        self._shapes = weight_map.tensors
        self._left: dict[str, int] = {}

    def completed(self, rule: Rule) -> list[str]:
        """The tensors that are whole once a parameter with this rule was added."""
        for segment in (segment for block in rule.blocks for segment in block if segment.source is not None):
            assert segment.source is not None
            left = self._left.setdefault(segment.source, self._shapes[segment.source][rule.axis or 0])
            self._left[segment.source] = left - segment.length
        return [name for name in rule.sources if self._left[name] == 0]


def _write(
    path: Path,
    plan: Sequence[Planned],
    turns: Iterator[dict[str, Tensor]],
    weight_map: WeightMap,
    missing: Mapping[str, Shape],
    mesh: Mesh,
) -> None:
    """The file, of what this rank completes in its `turns` and of what the others send; zeros for what is `missing`.

    In the order of turns: a rank that waits until its tensor is taken keeps nobody from gathering what is taken before.
    """
    assert sorted(each.name for each in plan) == sorted(weight_map.tensors), (
        "an export writes every tensor of the adapters, once"
    )
    tensors = {each.name: (each.dtype, weight_map.tensors[each.name]) for each in plan}
    tensors |= {name: (plan[0].dtype, shape) for name, shape in missing.items()}
    coming = deque(sorted(plan, key=lambda each: (each.turn, each.sender)))  # in one turn as it is sent
    with TensorFile(path, tensors) as file:
        for turn in count():
            own = next(turns, None)  # a stage may have more parameters than another one
            here = own or {}
            while coming and coming[0].turn == turn:
                name, sender = coming[0].name, coming.popleft().sender
                file.put(name, here[name] if sender == mesh.rank else _received(*tensors[name], sender, mesh))
            if own is None and not coming:
                return


def _received(dtype: torch.dtype, shape: Shape, sender: int, mesh: Mesh) -> Tensor:
    tensor = torch.empty(shape, dtype=dtype)
    dist.recv(as_bytes(tensor), group=mesh.world_group, group_src=sender)
    return tensor


def put_rows(tensors: dict[str, Tensor], rule: Rule, shards: Sequence[Tensor], weight_map: WeightMap) -> None:
    """Writes the rows of an adapter's parameter, of which `shards` are all TP ranks', into PEFT's tensors.

    A projection that is several blocks of its layer has its B in several parameters.
    """
    axis = rule.axis or 0
    for tp_rank, shard in enumerate(shards):
        offset = 0
        for segment in rule.shard(len(shards), tp_rank):
            if segment.source is not None:
                shape = weight_map.tensors[segment.source]
                whole = tensors.setdefault(segment.source, torch.zeros(shape, dtype=shard.dtype))
                rows = shard.narrow(axis, offset, segment.length)
                whole.narrow(axis, segment.start, segment.length).copy_(rows)
            offset += segment.length


def peft_config(spec: ModelSpec, lora: LoraConfig, targets: tuple[AdapterTarget, ...], head: Head) -> dict[str, Any]:
    """adapter_config.json, as `peft.LoraConfig` reads it."""
    named = peft_targets(spec.family.weight_map(spec.shape, head), targets)
    parameters: dict[str, Any] = {}
    if named.parameters:
        parameters["target_parameters"] = named.parameters
    if named.has_experts:
        # Fused, gate's and up's adapters are one of twice the rank, with the same alpha / rank.
        pattern = rf".*\.{re.escape(PEFT_EXPERTS_GATE_UP)}"
        parameters |= {"rank_pattern": {pattern: 2 * lora.rank}, "alpha_pattern": {pattern: 2 * lora.alpha}}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if head == "lm" else "SEQ_CLS",
        "base_model_name_or_path": str(spec.folder),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": named.modules,
        **parameters,
        "modules_to_save": ["score"] if head == "value" else None,
        "use_dora": lora.type == "dora",
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
