"""Pairs the parameters of this rank's stage with their rules of the weight map, for import and export alike."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from megappo.models.weight_map import Rule, WeightMap


@dataclass(frozen=True)
class StageParameter:
    """A parameter of this rank's stage: its name over the whole model, its shard, and its rule."""

    name: str
    tensor: Tensor
    rule: Rule


def stage_parameters(model: nn.Module, weight_map: WeightMap) -> Iterator[StageParameter]:
    """The stage's parameters in the order of the map, the same on all TP ranks of a stage.

    Megatron numbers the layers of a stage from 0; the map counts over the model.
    """
    rules = weight_map.by_parameter()
    found: dict[str, Tensor] = {}
    numbers = {index: layer.layer_number - 1 for index, layer in enumerate(model.decoder.layers)}  # type: ignore
    for name, tensor in model.named_parameters():
        found[_global_name(name, numbers)] = tensor
    unknown = sorted(set(found) - set(rules))
    assert not unknown, f"the weight map has no rule for {', '.join(unknown)}"
    for name, rule in rules.items():
        if name in found:
            yield StageParameter(name, found[name], rule)


def _global_name(name: str, numbers: dict[int, int]) -> str:
    prefix = "decoder.layers."
    if not name.startswith(prefix):
        return name
    index, rest = name.removeprefix(prefix).split(".", 1)
    return f"{prefix}{numbers[int(index)]}.{rest}"
