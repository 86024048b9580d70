"""Moves fingerprinted weights between layouts, and counts. Arguments: FOLDER (of models) CASES (JSON) --out FILE.

A case is {model, layout: {tp, pp, sequence_parallel, …}, generation: tp, bucket_bytes}.
"""

import argparse
import json
from collections import Counter
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megappo.config.grid import GenerationGrid
from megappo.config.layout import LayoutConfig
from megappo.engines.hybrid.account import CLASSES, Account, account_of, formula_of
from megappo.engines.hybrid.execute import Moved, Switch
from megappo.engines.hybrid.native import HybridTransfer
from megappo.engines.hybrid.plan import Planner
from megappo.engines.hybrid.sources import TrainingShards
from megappo.engines.hybrid.staging import MemoryMeter
from megappo.engines.hybrid.stream import hf_tensors
from megappo.engines.hybrid.weights import GenerationWeights
from megappo.engines.vllm.destination import VLLMDestination
from megappo.engines.vllm.targets import VLLMTargets
from megappo.models.architecture import ModelSpec
from megappo.models.build import build_model, read_model
from megappo.models.families.base import Family, ModelShape
from megappo.models.import_hf import import_hf
from megappo.models.weight_map import Head, WeightMap
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import Mesh, start_mesh
from tests.support.engine_stand_in import engine_stand_in
from tests.support.fingerprints import WholeTensors


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("cases", type=json.loads)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = []
    for case in arguments.cases:
        mesh = start_mesh(LayoutConfig(**case["layout"]), seed=0, timeout=timedelta(minutes=2))
        results.append(run_case(arguments.folder / case["model"], case, mesh))
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(results))


def run_case(folder: Path, case: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    spec = read_model(folder)
    experts = "sequential" if case.get("sequential") else "grouped"
    dtype = getattr(torch, case.get("dtype", "float32"))
    model = build_model(spec, mesh, dtype=dtype, layers="torch", head="lm", experts=experts)
    import_hf(model, spec, mesh)
    grid = GenerationGrid(mesh.training_grid, case["generation"])
    weights = GenerationWeights()
    planned_spec = replace(spec, family=BrokenFamily(spec.family)) if case.get("broken") else spec
    transfer = HybridTransfer(model, planned_spec, mesh, grid, weights, case.get("bucket_bytes", 1 << 18))
    report = transfer.run()
    wrong, elements = compare(weights, whole_tensors(folder, dtype), spec.shape, grid.tp, grid.tp_rank(mesh.rank))
    # An update of the training weights reaches the aliases at once, and the rest with the next run.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25)
    transfer.run()
    updated = whole_tensors(folder, dtype)
    updated.tensors = {name: tensor + 0.25 for name, tensor in updated.tensors.items()}
    late, _ = compare(weights, updated, spec.shape, grid.tp, grid.tp_rank(mesh.rank), padding=0.25)
    named = name_spoiled(transfer, weights, mesh) if case.get("spoil") else None
    moved = name_moved(model, spec, mesh, transfer.planner, grid) if case.get("moved") else None
    order, greedy = ([], "") if "bucket_bytes" not in case else (order_of(transfer), told_when_greedy(transfer, mesh))
    planned, counted = account_of(transfer.planner, mesh.rank), transfer.measured()
    measured = {
        "is_planned": planned == counted,
        "wrong": wrong,
        "named": named,
        "moved": moved,
        "late": late,
        "elements": elements,
        "received": report.bytes_received,
        "sent": report.bytes_sent,
        "copied": report.bytes_copied,
        "aliased": report.bytes_aliased,
        "staging": report.peak_bytes,
        "extra": report.extra_bytes,
        "buckets": transfer.planner.buckets.count,
        "order": order,
        "greedy": greedy,
        "parameters": parameter_bytes(model, weights),
    }
    ranks = gather_objects((measured, counted), mesh.world_group)
    total = sum((account for _, account in ranks), Account())
    formulas = {name: formula_of(transfer.planner, name, grid.tp) for name in CLASSES}
    transfer.release()
    naive = Moved()
    for _ in hf_tensors(model, spec, mesh, naive):
        pass
    gathered = sum(gather_objects(naive.received_by_class, mesh.world_group), Counter())
    return {
        "case": case,
        "ranks": [each for each, _ in ranks],
        "classes": {
            name: {
                "received": held.received,
                "redundant": held.redundant,
                "peak": held.peak,
                "copied": held.copied,
                "naive": gathered[name],
                "whole": formulas[name].whole,
                "received_by_formula": float(formulas[name].received * mesh.world_size),
                "redundant_by_formula": float(formulas[name].redundant * mesh.world_size),
                "peak_by_formula": float(formulas[name].peak * mesh.world_size),
            }
            for name, held in total.classes.items()
        },
        "released": weights.nbytes,
    }


def name_spoiled(transfer: HybridTransfer, weights: GenerationWeights, mesh: Mesh) -> list[str | None]:
    """What the transfer names as wrong before and after a received piece is changed on rank 1."""
    before, found = transfer.worst_tensor(), weights.parameters["decoder.layers.1.self_attention.linear_proj.weight"]
    if mesh.rank == 1:
        found[0].data[2, 1] += 0.5  # the columns of rank 0
    after = transfer.worst_tensor()
    transfer.run()
    repaired = transfer.worst_tensor()
    return [None if each is None else str(each) for each in (before, after, repaired)]


def name_moved(
    model: torch.nn.Module, spec: ModelSpec, mesh: Mesh, plan: Planner, grid: GenerationGrid
) -> list[str | bool | None]:
    """What a switch into vLLM's parameters names as wrong: at first, after one was given other memory on rank 1, and
    after the next run; and whether that filled the new memory."""
    targets = VLLMTargets(plan.kinds, spec.shape, grid, expert_parallel=False)
    planner = Planner(
        plan.kinds, plan.training, targets, layers_of_stages=mesh.stage_layers(spec.shape.num_layers), element_bytes=4,
        bucket_bytes=1 << 14, generation_tp=grid.tp,
    )  # fmt: skip
    engine, sources = (
        engine_stand_in(targets.of(mesh.rank)),
        TrainingShards(model, spec.family.weight_map(spec.shape, "lm")),
    )
    switch = Switch(planner, mesh.rank, sources, VLLMDestination(engine, mesh.device), mesh.world_group)
    switch.run()
    named, parameter = [switch.worst_tensor()], engine.get_parameter("model.layers.3.mlp.down_proj.weight")
    right = parameter.detach().clone()
    if mesh.rank == 1:
        parameter.data = torch.zeros_like(right)
    named.append(switch.worst_tensor())
    switch.run()
    named.append(switch.worst_tensor())
    return [*(None if each is None else each.name for each in named), torch.equal(parameter, right)]


def whole_tensors(folder: Path, dtype: torch.dtype) -> WholeTensors:
    """As a model of `dtype` holds them."""
    whole = WholeTensors(folder)
    whole.tensors = {
        name: tensor if name.endswith("e_score_correction_bias") else tensor.to(dtype)
        for name, tensor in whole.tensors.items()
    }
    return whole


class WatchedRequest:
    """Of one post."""

    def __init__(self, request: Any, number: int, order: list[str]) -> None:
        self.request = request
        self.note = f"wait {number}"
        self.order = order

    def wait(self) -> None:
        if self.note not in self.order:
            self.order.append(self.note)
        self.request.wait()


def order_of(transfer: HybridTransfer) -> list[str]:
    """Posts of a run, and the first wait for each, in order."""
    order: list[str] = []
    post = dist.batch_isend_irecv

    def posting(operations: Any) -> Any:
        number = sum(note.startswith("post") for note in order)
        order.append(f"post {number}")
        return [WatchedRequest(request, number, order) for request in post(operations)]

    with patch.object(dist, "batch_isend_irecv", posting):
        transfer.run()
    return order


def told_when_greedy(transfer: HybridTransfer, mesh: Mesh) -> str:
    """What the switch says when rank 1 takes more memory than the plan allows; nothing where it is content."""
    allocate, more = MemoryMeter.allocate, []

    def greedy(meter: MemoryMeter, nbytes: int, device: torch.device) -> torch.Tensor:
        if mesh.rank == 1 and not more:
            more.append(allocate(meter, transfer.planner.extra_bytes + 1, device))
        return allocate(meter, nbytes, device)

    with patch.object(MemoryMeter, "allocate", greedy):
        try:
            transfer.run()
            told = ""
        except AssertionError as error:
            told = str(error)
    transfer.run()
    return told


@dataclass(frozen=True)
class BrokenFamily:
    """A family whose weight map takes gate and up of layer 1 for one block, which is not how they are cut."""

    family: Family

    def weight_map(self, shape: ModelShape, head: Head) -> WeightMap:
        whole, name = self.family.weight_map(shape, head), "decoder.layers.1.mlp.linear_fc1.weight"
        rules = [
            replace(rule, blocks=(rule.blocks[0] + rule.blocks[1],)) if rule.names[0] == name else rule
            for rule in whole.rules
        ]
        return WeightMap(whole.tensors, tuple(rules))


def compare(
    weights: GenerationWeights, whole: WholeTensors, shape: Any, size: int, place: int, padding: float = 0.0
) -> tuple[list[str], int]:
    """(names of parameters with a wrong element, elements compared)."""
    wrong, count = [], 0
    named = [(name, None, pieces) for name, pieces in weights.parameters.items()]
    named += [(name, expert, pieces) for name, held in weights.experts.items() for expert, pieces in held.items()]
    for name, expert, pieces in named:
        axis = 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight", "weight2")) else 0
        expected = whole.expected(name, shape, size, place, expert)
        expected = torch.where(expected == 0, padding, expected)
        found = torch.cat(pieces, dim=axis)
        count += found.numel()
        if found.shape != expected.shape or not torch.equal(found, expected):
            wrong.append(name if expert is None else f"{name}:{expert}")
    return wrong, count


def parameter_bytes(model: torch.nn.Module, weights: GenerationWeights) -> int:
    """Bytes of all memory that parameters of both layouts lie in, each byte counted once."""
    pieces = [*weights.parameters.values(), *(held for layer in weights.experts.values() for held in layer.values())]
    tensors = [*model.parameters(), *(piece for several in pieces for piece in several)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


if __name__ == "__main__":
    main()
