"""The switches that bench_reshard.py measures, into the native engine's weights or into tensors of vLLM's shapes, and
what each of them left in memory. vLLM itself is not needed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import torch
from torch import Tensor, nn

from megappo.config.grid import GenerationGrid
from megappo.engines.hybrid.account import Account
from megappo.engines.hybrid.execute import Moved, Switch
from megappo.engines.hybrid.kinds import Kinds, with_numbers
from megappo.engines.hybrid.messages import Views
from megappo.engines.hybrid.native import HybridTransfer
from megappo.engines.hybrid.plan import Planner, even_stages
from megappo.engines.hybrid.sources import TrainingShards
from megappo.engines.hybrid.targets import Target
from megappo.engines.hybrid.transfers import Transfer
from megappo.engines.hybrid.weights import GenerationWeights
from megappo.engines.vllm.targets import VLLMTargets, vllm_name
from megappo.models.architecture import ModelSpec
from megappo.models.weight_map import WeightClass
from megappo.parallel.mesh import Mesh


class Measured(Protocol):
    """A switch that can be run any number of times, and looked at after each."""

    planner: Planner

    def run(self) -> Moved:
        """Moves the weights of this moment."""
        ...

    def release(self) -> None:
        """Gives back what only generation needs, as a step does before training goes on."""
        ...

    def account(self, moved: Moved) -> Account:
        """What a run left in memory, read off the tensors: bytes by weight class on this rank."""
        ...


class NativeSwitch:
    """Into the weights of the native engine."""

    def __init__(self, model: nn.Module, spec: ModelSpec, mesh: Mesh, grid: GenerationGrid, bucket_bytes: int) -> None:
        self._transfer = HybridTransfer(model, spec, mesh, grid, GenerationWeights(), bucket_bytes)
        self.planner = self._transfer.planner

    def run(self) -> Moved:
        self._transfer.run()
        return self._transfer.moved

    def release(self) -> None:
        self._transfer.release()

    def account(self, moved: Moved) -> Account:
        return self._transfer.measured()


class PlainTensors:
    """A destination of tensors with an engine's names and shapes; each of them is made once."""

    def __init__(
        self, targets: Sequence[Target], dtype: torch.dtype, device: torch.device, float32: frozenset[str] = frozenset()
    ) -> None:
        """`float32`: targets that have this type whatever `dtype` the others are of."""
        self.tensors: dict[str, Tensor] = {}
        self.classes: dict[str, WeightClass] = {}
        for target in targets:
            rows = (target.length,) if target.width is None else (target.length, target.width)
            shape = rows if target.axis == 0 else rows[::-1]
            shape = shape if target.experts is None else (len(target.experts), *shape)
            for layer in target.layers:
                name = with_numbers(target.name, layer)
                kept = torch.float32 if target.name in float32 else dtype
                self.tensors[name] = torch.zeros(shape, dtype=kept, device=device)
                self.classes[name] = target.weight_class

    def alias(self, transfer: Transfer, views: Views) -> None:
        self.tensors[transfer.target_name] = views[0]

    def is_alias(self, transfer: Transfer, views: Views) -> bool:
        return self.tensors[transfer.target_name].data_ptr() == views[0].data_ptr()

    def has_moved(self) -> bool:
        return False

    def current(self, transfer: Transfer) -> Views:
        return (self.view(transfer),)

    def view(self, transfer: Transfer) -> Tensor:
        tensor, axis, run = self.tensors[transfer.target_name], transfer.axis, transfer.experts
        if run is not None:
            tensor, axis = tensor.narrow(0, run.target_place, run.count), axis + 1
        return tensor.narrow(axis, transfer.target_offset, transfer.length)


class TensorSwitch:
    """Into tensors of vLLM's shapes."""

    def __init__(self, model: nn.Module, spec: ModelSpec, mesh: Mesh, grid: GenerationGrid, bucket_bytes: int) -> None:
        weight_map = spec.family.weight_map(spec.shape, "lm")
        kinds = Kinds.of(weight_map)
        self._sources = TrainingShards(model, weight_map)
        targets = VLLMTargets(kinds, spec.shape, grid, expert_parallel=mesh.ep > 1)
        dtype = next(model.parameters()).dtype
        self.planner = Planner(
            kinds,
            grid.training,
            targets,
            layers_of_stages=even_stages(spec.shape.num_layers, grid.training.pp),
            element_bytes=dtype.itemsize,
            bucket_bytes=bucket_bytes,
            generation_tp=grid.tp,
            grouped_experts=self._sources.has_grouped_experts,
        )
        float32 = frozenset(vllm_name(kind) for kind in kinds.kinds if kind.rule.is_float32)
        self._destination = PlainTensors(targets.of(mesh.rank), dtype, mesh.device, float32)
        self._switch = Switch(self.planner, mesh.rank, self._sources, self._destination, mesh.world_group)
        self._classes: Mapping[str, WeightClass] = {rule.names[0]: rule.weight_class for rule in weight_map.rules}

    def run(self) -> Moved:
        return self._switch.run()

    def release(self) -> None:
        """Nothing: an engine like vLLM keeps the places of its tensors."""

    def account(self, moved: Moved) -> Account:
        trained = [(self._classes[name], part) for name, parts in self._sources.tensors.items() for part in parts]
        made = [(self._destination.classes[name], tensor) for name, tensor in self._destination.tensors.items()]
        return account_of_tensors(trained, made, moved)


def account_of_tensors(
    trained: Iterable[tuple[WeightClass, Tensor]], made: Iterable[tuple[WeightClass, Tensor]], moved: Moved
) -> Account:
    """Bytes by class of the training shards and of an engine's tensors: aliased is what lies in the memory of the
    former, received what was counted on the wire, and copied the rest."""
    account, places = Account(), set()
    for name, tensor in trained:
        account.classes[name].training += tensor.nbytes
        places.add(tensor.untyped_storage().data_ptr())
    for name, tensor in made:
        held = account.classes[name]
        if tensor.untyped_storage().data_ptr() in places:
            held.aliased += tensor.nbytes
        else:
            held.copied += tensor.nbytes
    for name, held in account.classes.items():
        held.received = moved.received_by_class[name]
        held.copied -= held.received
    return account


def why_no_formula(name: WeightClass, engine: str, spec: ModelSpec, grid: GenerationGrid) -> str:
    """Why the formulas are not for this class in this case, or nothing; the plan alone says its bytes then."""
    training, moe = grid.training, spec.shape.moe
    if name == "experts" and training.etp > 1:
        return "experts are cut over etp"
    if engine != "vllm":
        return ""
    if name in ("dense", "replicated") and spec.shape.latent is not None:
        return "vLLM holds the down projections of latent attention whole, in one parameter"
    if name == "dense" and spec.shape.num_kv_heads % grid.tp:
        return f"vLLM holds {spec.shape.num_kv_heads} KV heads several times on {grid.tp} ranks"
    if name == "experts" and moe is not None and not _is_nested(moe.num_experts, grid):
        return "vLLM deals experts in order, which are not those that its ranks train"
    return ""


def _is_nested(num_experts: int, grid: GenerationGrid) -> bool:
    """Whether each rank's experts, dealt in order over its replica, hold those that it trains, or lie within them."""
    training = grid.training
    if training.ep == 1:  # vLLM cuts each expert then
        return True
    local, share = num_experts // training.ep, num_experts // grid.tp
    for rank in range(training.world_size):
        trained, made = training.ep_rank(rank) * local, grid.tp_rank(rank) * share
        low, high = max(trained, made), min(trained + local, made + share)
        if high - low < min(local, share):
            return False
    return True
