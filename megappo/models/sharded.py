"""A model whose parameters are cut over the data-parallel ranks (ZeRO-3) by torch's `fully_shard`.

Megatron's modules stay as they are: with tensor parallelism they hold plain tensors, this rank's TP shards, and each of
these is cut once more, along one axis, over the ranks of the data-parallel group: evenly where they divide one, else
by rows, of which the last ranks then have fewer, or none. Gradients and the optimizer are in `engines/sharded.py`, what
a checkpoint holds of a part in `part_state.py`.
"""

from __future__ import annotations

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from megappo.config.fsdp import FsdpConfig, RefFsdpConfig
from megappo.models.part_state import part_state
from megappo.parallel.mesh import Mesh

# Nothing here changes logits in place, which is what torch 2.13 warns of whenever they are a view.
warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")


@dataclass(frozen=True)
class Part:
    """One parameter's part on this rank: where the parameter is, the DTensor in its place, and `local`, the same memory
    as a plain parameter with Megatron's marks. `shape` is that of the TP rank's shard; along `axis` it is cut, and the
    part begins at `start`."""

    module: nn.Module
    name: str
    distributed: nn.Parameter
    local: nn.Parameter
    shape: torch.Size
    axis: int
    start: int

    @property
    def is_empty(self) -> bool:
        """Whether other ranks have all of it."""
        return self.local.numel() == 0


class Shards:
    """This rank's parts of the parameters of `model`, which are cut when it is made. A collective call.

    Each layer is gathered when it runs; embedding, last norm and output layer together for the whole pass. `dtype` is
    that of the computation; parts that are trained are float32.
    """

    def __init__(self, model: GPTModel, mesh: Mesh, config: RefFsdpConfig) -> None:
        from torch.distributed.device_mesh import DeviceMesh  # here: only cut models need these
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        self.model = model
        self.mesh = mesh
        self.reduces_each = not isinstance(config, FsdpConfig) or config.reduce_each_micro_batch
        self._reshards = config.reshard_after_forward
        self._is_gathered = False
        dtype = model.config.params_dtype
        _without_fused_gradients(model)
        marks = {name: vars(parameter).copy() for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            parameter.cut_axis = _axis(name, parameter, mesh.dp)
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        settings: dict[str, Any] = {
            "mesh": DeviceMesh.from_group(mesh.dp_group, mesh.device.type),
            # Inputs of layers stay as they are: RoPE's angles are float32.
            "mp_policy": MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False),
            "shard_placement_fn": lambda parameter: _placement(parameter.cut_axis),
        }
        for unit in (*model.decoder.layers, model):
            if is_trained:
                _to_float32(unit)
            # What the whole model holds itself is used again as soon as the backward pass begins.
            fully_shard(unit, reshard_after_forward=config.reshard_after_forward and unit is not model, **settings)
        self._units: list[FSDPModule] = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for unit in self._units:
            # Losses have global denominators: gradients are summed. gloo has no operation that divides.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        if config.forward_prefetch:
            layers: list[Any] = list(model.decoder.layers)
            for layer, following in pairwise(layers):
                layer.set_modules_to_forward_prefetch([following])
        self.parts = {name: _part(model, name, marks[name], mesh) for name, _ in model.named_parameters()}
        model.shards = self

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parts by the names of the parameters."""
        return {name: part.local for name, part in self.parts.items()}

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the whole parameters while they are gathered."""
        return sum(parameter.nbytes for parameter in self.model.parameters()) if self._is_gathered else 0

    def gather(self) -> None:
        """Makes every parameter whole, in the type of the computation, until `release`. A collective call over the
        data-parallel ranks; what runs until then is none."""
        assert not self._is_gathered, "the parameters are whole already"
        self._is_gathered = True
        for unit in self._units:
            unit.unshard()
        for layer in self._layers:
            layer.set_reshard_after_forward(False, recurse=False)

    def release(self) -> None:
        """Gives the whole parameters up; does nothing where there are none."""
        self._is_gathered = False
        for layer in self._layers:
            layer.set_reshard_after_forward(self._reshards, recurse=False)
        for unit in self._units:
            unit.reshard()

    def rest(self) -> None:
        """Gives up what a pass without a backward pass has left gathered."""
        if not self._is_gathered:
            for unit in self._units:
                unit.reshard()

    def reduces(self, is_set: bool) -> None:
        """Whether backward passes reduce gradients over the ranks, or add to whole ones."""
        for unit in self._units:
            unit.set_requires_gradient_sync(is_set, recurse=False)

    def sharded_state(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Megatron's sharded tensors of the model, each the part of this rank; none of what other ranks have all of."""
        with self._in_place() as parts:
            state: dict[str, Any] = self.model.sharded_state_dict(metadata=metadata)
        found = {}
        for key, entry in state.items():
            part = parts.get(id(getattr(entry, "data", None)))
            if part is None:
                found[key] = entry
            elif not part.is_empty:
                found[key] = part_state(entry, part.local, part.axis, part.start)
        return found

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Fills the parts from a loaded `sharded_state`."""
        own = {name: part.local for name, part in self.parts.items() if not part.is_empty}
        missing = sorted(set(own) - set(state))
        assert not missing, f"the checkpoint holds no {missing[0]}"
        for name, local in own.items():
            local.copy_(state[name])

    @property
    def _layers(self) -> list[Any]:
        return list(self.model.decoder.layers)

    @contextmanager
    def _in_place(self) -> Iterator[dict[int, Part]]:
        """While inside, the modules hold parameters of the shapes of the TP rank's shards that have no memory, for what
        describes them; yields the parts by the ids of these."""
        assert not self._is_gathered, "parts are read while the parameters are not whole"
        self.rest()
        parts = {}
        for part in self.parts.values():
            whole = nn.Parameter(torch.empty(part.shape, dtype=part.local.dtype, device="meta"))
            part.module._parameters[part.name] = whole
            parts[id(whole)] = part
        try:
            yield parts
        finally:
            for part in self.parts.values():
                part.module._parameters[part.name] = part.distributed


def shards_of(model: nn.Module) -> Shards | None:
    """The parts of a model that is cut over the data-parallel ranks; None of one that each of them holds."""
    return getattr(model, "shards", None)


@contextmanager
def whole_parameters(model: nn.Module) -> Iterator[None]:
    """While inside, the parameters of `model` are this rank's TP shards, whether it is cut or not. A collective call
    over the data-parallel ranks."""
    shards = shards_of(model)
    if shards is None or shards._is_gathered:
        yield
        return
    shards.gather()
    try:
        yield
    finally:
        shards.release()


def _axis(name: str, parameter: nn.Parameter, dp: int) -> int:
    """The first axis that `dp` divides, for parts that are alike. Where there is none, rows: torch (2.13) has parts of
    other lengths along the first axis alone.

    Of a gated feed-forward the rows of both matrices lie one above the other: along its columns, a part has its share
    of either.
    """
    axes = [1] if name.endswith("mlp.linear_fc1.weight") else range(parameter.dim())
    return next((axis for axis in axes if parameter.shape[axis] % dp == 0), 0)


def _without_fused_gradients(model: GPTModel) -> None:
    """Apex's and Transformer Engine's fused products add to a buffer of DDP's, and there is none."""
    model.config.gradient_accumulation_fusion = False
    for module in model.modules():
        for name in ("gradient_accumulation_fusion", "fuse_wgrad_accumulation"):
            if hasattr(module, name):
                setattr(module, name, False)


def _placement(axis: int) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(axis)


def _to_float32(unit: nn.Module) -> None:
    """What an optimizer steps is float32; one unit at a time, so that no second whole model exists."""
    from torch.distributed.tensor import DTensor

    for module in unit.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or isinstance(parameter, DTensor) or parameter.dtype == torch.float32:
                continue
            wide = nn.Parameter(parameter.detach().float(), parameter.requires_grad)
            wide.cut_axis = parameter.cut_axis  # type: ignore[attr-defined]
            module._parameters[name] = wide


def _part(model: nn.Module, path: str, marks: dict[str, Any], mesh: Mesh) -> Part:
    owner, _, name = path.rpartition(".")
    module = model.get_submodule(owner)
    distributed: Any = module._parameters[name]
    local = nn.Parameter(distributed.to_local().detach(), distributed.requires_grad)
    for parameter in (distributed, local):
        for mark, value in marks.items():
            setattr(parameter, mark, value)
    axis, shape = distributed.placements[0].dim, distributed.shape
    start = min(mesh.dp_rank * -(-shape[axis] // mesh.dp), shape[axis])  # each has as many, rounded up, while there are
    return Part(module, name, distributed, local, shape, axis, start)
