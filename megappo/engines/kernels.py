"""Which kernels a model is trained on: what a run says at its start, and keeps in `environment.json`.

Transformer Engine's and Apex's are taken where they can be imported (Megatron looks for them, Transformer Engine's
first); what runs is read off the objects that were built, not off what is installed.
"""

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

from typing import Any

from megatron.core.optimizer import clip_grads
from torch import nn

from megappo.engines.optimizer import Optimizer
from megappo.models.chunks import chunks_of


def kernels_of(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """Part → `package.name` of what computes it, of this rank's first layer and of the optimizer."""
    layers: list[Any] = [layer for chunk in chunks_of(model) for layer in chunk.decoder.layers]
    norms = [type(module) for module in model.modules() if type(module).__name__.endswith("Norm")]
    experts = [type(layer.mlp.experts) for layer in layers if hasattr(layer.mlp, "experts")]
    found = {
        "attention": type(layers[0].self_attention.core_attention),
        "linear": type(layers[0].self_attention.linear_proj),
        "norm": norms[0],
        "optimizer": optimizer.kind,
        "gradient norm": clip_grads.l2_norm_impl,
    } | ({"experts": experts[0]} if experts else {})
    names = {part: _name(what) for part, what in found.items()}
    fused = chunks_of(model)[0].config.gradient_accumulation_fusion
    return names | {"weight gradients": runtime.WEIGHT_GRADIENT_KERNEL if fused else "torch.matmul"}


def _name(what: Any) -> str:
    """`package.name` of a class or function."""
    return f"{what.__module__.split('.')[0]}.{what.__name__}"
