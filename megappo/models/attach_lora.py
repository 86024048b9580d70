"""Puts adapters into a model, and gives its weights with what the adapters change.

The layers themselves are in `lora.py`, the files of PEFT in `export_adapter.py`.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import hashlib
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from megappo.config.lora import LoraConfig
from megappo.errors import ConfigError
from megappo.models.adapter_map import (
    AdapterTarget,
    adapter_map,
    adapter_targets,
    refuse_kinds_for_experts,
    row_blocks,
)
from megappo.models.architecture import ModelSpec
from megappo.models.chunks import StageModel, chunks_of
from megappo.models.expert_lora import ExpertsAdapter, attach_to_experts, expert_adapters
from megappo.models.import_hf import head_of
from megappo.models.lora import LinearAdapter, adapters
from megappo.models.stage_parameters import StageParameter, stage_parameters
from megappo.models.weight_map import Block, Head, WeightMap, cut
from megappo.parallel.mesh import Mesh


def attach_lora(
    model: StageModel,
    spec: ModelSpec,
    mesh: Mesh,
    lora: LoraConfig,
    head: Head,
    seed: int,
    setting: str = "model.lora",
) -> None:
    """Freezes `model`, this rank's stage with its weights in it, and gives it adapters, which alone are trained (with
    the head of a value model). `seed` decides A, on every layout alike. Raises ConfigError, in which `setting` is the
    section of `lora`. All TP ranks call it."""
    weight_map = spec.family.weight_map(spec.shape, head)
    targets = {target.adapter: target for target in adapter_targets(weight_map, lora.target_modules, setting)}
    refuse_kinds_for_experts(weight_map, tuple(targets.values()), lora, setting)
    model.requires_grad_(False)
    if head_of(model) == "value":
        chunks_of(model)[-1].output_layer.requires_grad_(True)
    for layer in (layer for chunk in chunks_of(model) for layer in chunk.decoder.layers):
        prefix = f"decoder.layers.{layer.layer_number - 1}."
        for target in (target for name, target in targets.items() if name.startswith(prefix)):
            parent, _, name = target.linear.removeprefix(prefix).rpartition(".")
            if target.rule.experts is not None:
                attach_to_experts(layer.mlp, target, lora, mesh)
                continue
            _attach(layer.get_submodule(parent), name, target, weight_map, lora, mesh)
    with torch.no_grad():
        for item in stage_parameters(
            model, adapter_map(weight_map, tuple(targets.values()), lora, head), is_partial=True
        ):
            if ".lora_A." in item.name:
                _draw(item, mesh, lora.rank, targets[item.name.partition(".lora_A.")[0]].in_size, seed)
    for _, linear, adapter in adapters(model):
        adapter.reset_magnitude(linear)
    model.lora = lora


def attached_lora(model: nn.Module) -> LoraConfig | None:
    """What the adapters of a bare stage were made with; None where it has none."""
    lora = getattr(model, "lora", None)
    return lora if isinstance(lora, LoraConfig) else None


class Merge:
    """Gives the weights of a stage with what its adapters add: new tensors, the weights themselves stay as they are."""

    def __init__(self, model: nn.Module) -> None:
        self._of_weight: dict[nn.Parameter, Callable[[StageParameter], Tensor]] = {}
        for _, linear, adapter in adapters(model):
            self._of_weight[linear.weight] = partial(_merged_linear, linear, adapter)  # type: ignore[index]
        for weight, experts in expert_adapters(model):
            self._of_weight[weight] = partial(_merged_expert, experts)

    def changes(self, item: StageParameter) -> bool:
        """Whether an adapter stands beside the parameter."""
        return item.parameter in self._of_weight

    def __call__(self, item: StageParameter) -> Tensor:
        """The parameter's tensor, or a new one with ΔW in it. All TP ranks of a model copy call it together."""
        merged = self._of_weight.get(item.parameter)
        return item.tensor if merged is None else merged(item)


def _merged_linear(linear: nn.Module, adapter: LinearAdapter, item: StageParameter) -> Tensor:
    return adapter.merged(linear)


def _merged_expert(adapter: ExpertsAdapter, item: StageParameter) -> Tensor:
    assert item.expert is not None, f"{item.name} is an expert's"
    return adapter.merged(item.tensor, item.expert)


def _attach(
    parent: nn.Module, name: str, target: AdapterTarget, weight_map: WeightMap, lora: LoraConfig, mesh: Mesh
) -> None:
    linear: nn.Module = parent.get_submodule(name)
    if hasattr(linear, "layer_norm_weight"):
        raise ConfigError(
            f"model.lora: {target.linear} holds a norm of Transformer Engine's; set model.layers to torch"
        )
    blocks = [_share(block, target, mesh) for block in row_blocks(weight_map, target)]
    adapter = LinearAdapter(target, blocks, lora, mesh, linear.weight)  # type: ignore[arg-type]
    parent.add_module(target.adapter.rpartition(".")[2], adapter)
    linear.register_forward_hook(adapter.change_output)


def _share(block: Block, target: AdapterTarget, mesh: Mesh) -> Block:
    """This TP rank's rows of a block."""
    if target.is_row_parallel:
        return block
    size = sum(segment.length for segment in block) // mesh.tp
    return tuple(cut(block, mesh.tp_rank * size, (mesh.tp_rank + 1) * size))


def _draw(item: StageParameter, mesh: Mesh, rank: int, in_size: int, seed: int) -> None:
    """Fills this rank's columns of an A [rank, in] of uniform numbers within ±1/√in, PEFT's own start."""
    (source,) = item.rule.sources
    digest = hashlib.sha256(f"{seed} {source}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    whole: Tensor = (torch.rand(rank, in_size, generator=generator) * 2 - 1) / math.sqrt(in_size)
    if item.rule.axis is None:
        item.tensor.copy_(whole)
        return
    (columns,) = item.shard(mesh)
    item.tensor.copy_(whole[:, columns.start : columns.start + columns.length])
