"""The training shards of this rank as a plan names them."""

from collections.abc import Mapping

from torch import Tensor, nn

from megappo.engines.hybrid.execute import Views
from megappo.engines.hybrid.plan import Transfer
from megappo.models.stage_parameters import stage_parameters
from megappo.models.weight_map import WeightMap
from megappo.parallel.mesh import Mesh


class TrainingShards:
    """Views into the parameters of this rank's stage; the weights themselves are read when a switch runs."""

    def __init__(self, model: nn.Module, weight_map: WeightMap, mesh: Mesh) -> None:
        """`model`: the bare stage, as `build_model` made it. A tied model's second copy passes for its embedding."""
        owners = {source: rule.names[0] for rule in weight_map.rules if not rule.is_copy for source in rule.sources}
        shards: dict[str, list[Tensor]] = {}
        for parameter in stage_parameters(model, weight_map, mesh):
            name = owners[parameter.rule.sources[0]] if parameter.rule.is_copy else parameter.rule.names[0]
            shards.setdefault(name, []).append(parameter.tensor.detach())
        self._experts = {rule.names[0] for rule in weight_map.rules if rule.experts is not None}
        self._shards = {name: _stacked(parts) if name in self._experts else parts for name, parts in shards.items()}

    @property
    def has_grouped_experts(self) -> bool:
        """Whether all experts of a layer are one tensor; true where there are none."""
        return all(len(parts) == 1 for parts in self._shards.values())

    @property
    def tensors(self) -> Mapping[str, list[Tensor]]:
        """Global name → the shard, or one tensor for each local expert."""
        return self._shards

    def views(self, transfer: Transfer) -> Views:
        parts = self._shards[transfer.source_name]
        start, length = transfer.source_offset, transfer.length
        run = transfer.experts
        if run is None:
            return (parts[0].narrow(transfer.axis, start, length),)
        if len(parts) == 1:
            stack = parts[0].narrow(0, run.source_place, run.count)
            return (stack.narrow(1 + transfer.axis, start, length),)
        several = parts[run.source_place : run.source_place + run.count]
        return tuple(part.narrow(transfer.axis, start, length)[None] for part in several)


def _stacked(experts: list[Tensor]) -> list[Tensor]:
    """[experts, rows, columns] where the experts are slices of one parameter, else the experts as they are."""
    first = experts[0]
    step = first.numel()
    is_one = all(
        expert.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and expert.is_contiguous()
        and expert.storage_offset() == first.storage_offset() + place * step
        for place, expert in enumerate(experts)
    )
    return [first.as_strided((len(experts), *first.shape), (step, *first.stride()))] if is_one else experts
