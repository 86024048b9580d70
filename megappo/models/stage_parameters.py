"""Pairs the parameters of this rank's stage with their rules of the weight map, for import and export alike."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from megappo.models.adapter_map import SUFFIX
from megappo.models.chunks import chunks_of
from megappo.models.weight_map import EXPERT, Rule, Segment, WeightMap
from megappo.parallel.mesh import Mesh

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_LOCAL_EXPERT = re.compile(r"(.*\.local_experts\.)(\d+)(\..*)")


@dataclass(frozen=True)
class StageParameter:
    """A parameter of this rank's stage: its name over the whole model, its shard, and its rule.

    Experts come one by one: `expert` is its number in the layer, `tensor` its [rows, columns], the rule that of this
    expert alone. `parameter` is then what `tensor` is, or is a view into; otherwise both are the same.
    """

    name: str
    tensor: Tensor
    rule: Rule
    parameter: nn.Parameter
    expert: int | None = None

    def shard(self, mesh: Mesh) -> tuple[Segment, ...]:
        """What the rank's shard is made of, in order along the rule's axis."""
        if self.expert is None:
            return self.rule.shard(mesh.tp, mesh.tp_rank)
        return self.rule.shard(mesh.etp, mesh.etp_rank)


@dataclass(frozen=True)
class _Found:
    """A parameter, and the numbers of the experts that it holds."""

    parameter: nn.Parameter
    experts: Sequence[int] = ()


def stage_parameters(model: nn.Module, weight_map: WeightMap, *, is_partial: bool = False) -> Iterator[StageParameter]:
    """The stage's parameters in the order of the map, the same on all TP ranks of a stage.

    Adapters are no part of a model's own map; `is_partial` is for a map of them, which lacks the model's parameters.

    Ranks that share the experts of a layer have as many each, in the same places of the order. Megatron numbers the
    layers of a stage and the experts of a rank from 0; the map counts over the model and over the layer.
    """
    rules, found = weight_map.by_parameter(), _found(model)
    unknown = sorted(name for name in set(found) - set(rules) if f"{SUFFIX}." not in name)
    assert is_partial or not unknown, f"the weight map has no rule for {', '.join(unknown)}"
    for name, rule in rules.items():
        for held in found.get(name, ()):
            if rule.experts is None:
                yield StageParameter(name, held.parameter, rule, held.parameter)
                continue
            # A module an expert has one matrix; a parameter of all local experts has them along its first axis.
            matrices = [held.parameter] if EXPERT in name else held.parameter.detach()
            for expert, matrix in zip(held.experts, matrices, strict=True):
                own_name = name.replace(EXPERT, str(expert))
                yield StageParameter(own_name, matrix, rule.of_expert(expert), held.parameter, expert)


def _found(model: nn.Module) -> dict[str, list[_Found]]:
    """The stage's parameters by their names in the map; several where each expert is a module of its own."""
    found: dict[str, list[_Found]] = {}
    for chunk in chunks_of(model):
        layers = list(chunk.decoder.layers)
        for name, parameter in chunk.named_parameters():
            in_layer = _LAYER.fullmatch(name)
            experts: Sequence[int] = ()
            if in_layer is not None:
                layer = layers[int(in_layer[1])]
                experts = getattr(layer.mlp, "local_expert_indices", ())
                name = f"decoder.layers.{layer.layer_number - 1}.{in_layer[2]}"
            in_expert = _LOCAL_EXPERT.fullmatch(name)
            if in_expert is not None:
                name, experts = f"{in_expert[1]}{EXPERT}{in_expert[3]}", (experts[int(in_expert[2])],)
            found.setdefault(name, []).append(_Found(parameter, experts))
    return found
