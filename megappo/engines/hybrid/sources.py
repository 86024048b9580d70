"""The training shards of this rank as a plan names them."""

from collections.abc import Mapping

from torch import Tensor, nn

from megappo.engines.hybrid.messages import Views
from megappo.engines.hybrid.plan import Transfer
from megappo.models.stage_parameters import stage_parameters
from megappo.models.weight_map import WeightMap


class TrainingShards:
    """Views into the parameters of this rank's stage; the weights themselves are read when a switch runs."""

    def __init__(self, model: nn.Module, weight_map: WeightMap) -> None:
        """`model`: the bare stage, as `build_model` made it. A tied model's second copy passes for its embedding."""
        owners = {source: rule.names[0] for rule in weight_map.rules if not rule.is_copy for source in rule.sources}
        self._shards: dict[str, list[Tensor]] = {}
        for parameter in stage_parameters(model, weight_map):
            name = owners[parameter.rule.sources[0]] if parameter.rule.is_copy else parameter.rule.names[0]
            shards = self._shards.setdefault(name, [])
            if parameter.expert is None:
                shards.append(parameter.tensor.detach())
            elif parameter.parameter is parameter.tensor:
                shards.append(parameter.tensor.detach()[None])
            elif not shards:
                shards.append(parameter.parameter.detach())

    @property
    def has_grouped_experts(self) -> bool:
        """Whether all experts of a layer are one tensor; true where there are none."""
        return all(len(parts) == 1 for parts in self._shards.values())

    @property
    def tensors(self) -> Mapping[str, list[Tensor]]:
        """Global name → the shard; with experts [experts, rows, columns], or several [1, rows, columns]."""
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
        return tuple(part.narrow(1 + transfer.axis, start, length) for part in several)
