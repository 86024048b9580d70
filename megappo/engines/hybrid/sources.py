"""The training shards of this rank as a plan names them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megappo.engines.hybrid.execute import Moved
from megappo.engines.hybrid.messages import Views
from megappo.engines.hybrid.plan import Planner
from megappo.engines.hybrid.transfers import Transfer, Way
from megappo.models.attach_lora import Merge
from megappo.models.stage_parameters import StageParameter, stage_parameters
from megappo.models.weight_map import WeightMap


class TrainingShards:
    """Views into the parameters of this rank's stage; the weights themselves are read when a switch runs.

    Of weights with adapters they are views into merged copies, which `refresh` makes, or writes anew where they are: so
    nothing that an engine aliases is ever the frozen weight.
    """

    def __init__(self, model: nn.Module, weight_map: WeightMap) -> None:
        """`model`: the bare stage, as `build_model` made it. A tied model's second copy passes for its embedding."""
        owners = {source: rule.names[0] for rule in weight_map.rules if not rule.is_copy for source in rule.sources}
        self._shards: dict[str, list[Tensor]] = {}
        self._merge = Merge(model)
        self._adapted: dict[str, list[StageParameter]] = {}
        self._has_copies = False
        for parameter in stage_parameters(model, weight_map):
            name = owners[parameter.rule.sources[0]] if parameter.rule.is_copy else parameter.rule.names[0]
            shards = self._shards.setdefault(name, [])
            if self._merge.changes(parameter):
                self._adapted.setdefault(name, []).append(parameter)
            if parameter.expert is None:
                shards.append(parameter.tensor.detach())
            elif parameter.parameter is parameter.tensor:
                shards.append(parameter.tensor.detach()[None])
            elif not shards:
                shards.append(parameter.parameter.detach())
        self._frozen = {name: self._shards[name] for name in self._adapted}

    def refresh(self) -> None:
        """Merges the adapters of this moment. All TP ranks of a model copy call it together, before a switch."""
        for name, parameters in self._adapted.items():
            if not self._has_copies:
                self._shards[name] = [torch.empty_like(shard) for shard in self._shards[name]]
            for parameter, matrix in zip(parameters, self._matrices(name), strict=True):
                matrix.copy_(self._merge(parameter))
        self._has_copies = True

    def drop(self) -> None:
        """Lets go of the merged copies; the next `refresh` makes them in other memory."""
        for name in self._adapted:
            self._shards[name] = self._frozen[name]
        self._has_copies = False

    def _matrices(self, name: str) -> list[Tensor]:
        """The shard's matrices, of which experts have one each."""
        if self._adapted[name][0].expert is None:
            return self._shards[name]
        return [matrix for shard in self._shards[name] for matrix in shard]

    def with_copies_counted(self, moved: Moved, planner: Planner, rank: int) -> Moved:
        """`moved`, in which the bytes of merged copies that an engine aliases count as copied."""
        if self._adapted:
            merged = sum(
                transfer.nbytes
                for transfer in planner.receives(rank)
                if transfer.way is Way.ALIAS and transfer.source_name in self._adapted
            )
            moved.aliased -= merged
            moved.copied += merged
        return moved

    @property
    def has_grouped_experts(self) -> bool:
        """Whether all experts of a layer are one tensor; true where there are none."""
        return all(len(parts) == 1 for parts in self._shards.values())

    @property
    def tensors(self) -> Mapping[str, list[Tensor]]:
        """Global name → the shard; with experts [experts, rows, columns], or several [1, rows, columns]."""
        return self._shards

    def views(self, transfer: Transfer) -> Views:
        """Of this rank's shard, the rows that `transfer` takes: views, nothing is copied."""
        name = transfer.source_name
        assert self._has_copies or name not in self._adapted, f"{name} has an adapter, which was not merged"
        parts = self._shards[name]
        start, length = transfer.source_offset, transfer.length
        run = transfer.experts
        if run is None:
            return (parts[0].narrow(transfer.axis, start, length),)
        if len(parts) == 1:
            stack = parts[0].narrow(0, run.source_place, run.count)
            return (stack.narrow(1 + transfer.axis, start, length),)
        several = parts[run.source_place : run.source_place + run.count]
        return tuple(part.narrow(1 + transfer.axis, start, length) for part in several)
