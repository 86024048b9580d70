"""Training shards → whole Hugging Face tensors on every rank, one parameter after another.

For engines that can't take shards: it moves far more bytes than a plan does. What is in flight is bounded by the
largest parameter; how long a tensor lives is for its taker to say.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megappo.engines.hybrid.execute import Moved
from megappo.engines.hybrid.lost_ranks import lost_ranks_named
from megappo.engines.hybrid.staging import MemoryMeter
from megappo.models.architecture import ModelSpec
from megappo.models.attach_lora import Merge
from megappo.models.export_hf import assembled
from megappo.models.stage_parameters import StageParameter, stage_parameters
from megappo.models.weight_map import WeightClass, WeightMap
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import Mesh


@dataclass(frozen=True)
class _Entry:
    """A parameter as the ranks that lack it see it: the tensors it makes, whether experts share it, class and type."""

    sources: tuple[str, ...]
    is_expert: bool
    weight_class: WeightClass
    dtype: torch.dtype


def hf_tensors(model: nn.Module, spec: ModelSpec, mesh: Mesh, moved: Moved) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the model under its Hugging Face name, a new one each, on `mesh.device`, of its parameter's type.

    `model` is this rank's stage of a language model, whose adapters are merged into the tensors. Collective: every rank
    of the world takes all tensors. What was sent and received is added to `moved`, and the most bytes of these tensors
    that were alive at once. Raises SwitchError where a rank is lost.
    """
    weight_map = spec.family.weight_map(spec.shape, "lm")
    stage = [parameter for parameter in stage_parameters(model, weight_map) if not parameter.rule.is_copy]
    stream = _Stream(weight_map, mesh, moved, Merge(model))
    entries = [_entry(parameter) for parameter in stage]
    with lost_ranks_named("the list of parameters"):
        by_stage = gather_objects(gather_objects(entries, mesh.ep_group), mesh.pp_group)
    for number, by_ep_rank in enumerate(by_stage):
        for place, entry in enumerate(by_ep_rank[0]):
            own = stage[place] if number == mesh.pp_rank else None
            if entry.is_expert:
                for ep_rank, of_rank in enumerate(by_ep_rank):
                    yield from stream.expert(of_rank[place], own, number, ep_rank)
            else:
                yield from stream.dense(entry, own, number)


def _entry(parameter: StageParameter) -> _Entry:
    return _Entry(
        parameter.rule.sources, parameter.expert is not None, parameter.rule.weight_class, parameter.tensor.dtype
    )


class _Stream:
    """Makes the tensors of one parameter on all ranks; `own` is the parameter on the stage that holds it."""

    def __init__(self, weight_map: WeightMap, mesh: Mesh, moved: Moved, merge: Merge) -> None:
        self._weight_map = weight_map
        self._mesh = mesh
        self._moved = moved
        self._merge = merge
        self._meter = MemoryMeter()

    def dense(self, entry: _Entry, own: StageParameter | None, stage: int) -> Iterator[tuple[str, Tensor]]:
        tensors = self._empty(entry) if own is None else self._whole(own, self._mesh.tp_group)
        for name, tensor in tensors.items():
            self._send(name, tensor, entry, self._mesh.pp_group, stage)
            yield name, tensor

    def expert(
        self, entry: _Entry, own: StageParameter | None, stage: int, ep_rank: int
    ) -> Iterator[tuple[str, Tensor]]:
        """The expert of rank `ep_rank` at the place of this rank's own."""
        is_mine = own is not None and self._mesh.ep_rank == ep_rank
        tensors = self._whole(own, self._mesh.etp_group) if own is not None and is_mine else self._empty(entry)
        for name, tensor in tensors.items():
            if own is not None:
                self._send(name, tensor, entry, self._mesh.ep_group, ep_rank)
            self._send(name, tensor, entry, self._mesh.pp_group, stage)
            yield name, tensor

    def _empty(self, entry: _Entry) -> dict[str, Tensor]:
        tensors = {
            name: torch.empty(self._weight_map.tensors[name], dtype=entry.dtype, device=self._mesh.device)
            for name in entry.sources
        }
        self._watch(list(tensors.values()))
        return tensors

    def _whole(self, parameter: StageParameter, group: ProcessGroup) -> dict[str, Tensor]:
        """The parameter's tensors, from the shards of all ranks of the group."""
        shard = self._merge(parameter).detach().contiguous()
        shards = [shard]
        if parameter.rule.axis is not None and group.size() > 1:
            shards = [torch.empty_like(shard) for _ in range(group.size())]
            with lost_ranks_named(f"the shards of {parameter.name}"):
                dist.all_gather(shards, shard, group=group)
            self._watch(shards)
            self._count(
                parameter.rule.weight_class, shard.nbytes * (group.size() - 1), shard.nbytes * (group.size() - 1)
            )
        tensors = dict(assembled(parameter.rule, shards, self._weight_map, self._mesh.device))
        self._watch(list(tensors.values()))
        return tensors

    def _send(self, name: str, tensor: Tensor, entry: _Entry, group: ProcessGroup, source: int) -> None:
        """From the group's rank `source` to all others."""
        if group.size() == 1:
            return
        with lost_ranks_named(f"tensor {name}"):
            dist.broadcast(tensor, group=group, group_src=source)
        is_source = group.rank() == source
        sent, received = (tensor.nbytes * (group.size() - 1), 0) if is_source else (0, tensor.nbytes)
        self._count(entry.weight_class, sent, received)

    def _count(self, weight_class: WeightClass, sent: int, received: int) -> None:
        self._moved.sent += sent
        self._moved.received_by_class[weight_class] += received

    def _watch(self, tensors: Sequence[Tensor]) -> None:
        """Adds up the bytes of this stream's tensors that somebody holds at this moment."""
        self._meter.watch(tensors)
        self._moved.peak_bytes = max(self._moved.peak_bytes, self._meter.peak_bytes)
