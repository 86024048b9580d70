"""A module with an engine's parameters, by a plan's names and shapes: what a destination fills, without the engine."""

from collections.abc import Sequence

import torch
from torch import nn

from megappo.engines.hybrid.kinds import with_numbers
from megappo.engines.hybrid.targets import Target


def engine_stand_in(targets: Sequence[Target]) -> nn.Module:
    """Parameters of zeros, float32."""
    model = nn.Module()
    for target in targets:
        rows = (target.length,) if target.width is None else (target.length, target.width)
        shape = rows if target.axis == 0 else rows[::-1]
        shape = shape if target.experts is None else (len(target.experts), *shape)
        for layer in target.layers:
            *path, leaf = with_numbers(target.name, layer).split(".")
            module = model
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(torch.zeros(shape), requires_grad=False))
    return model
