"""Which kernels a model is trained on: what a run says at its start, and keeps in `environment.json`.

Transformer Engine's and Apex's are taken where they can be imported (Megatron looks for them, Transformer Engine's
first); what runs is read off the objects that were built, not off what is installed.
"""

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

from collections.abc import Sequence
from typing import Any

from megatron.core.optimizer import clip_grads
from torch import nn

from megappo.engines.optimizer import Optimizer
from megappo.models.chunks import chunks_of


def kernels_of(model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """Part → `package.name` of what computes it, of this rank's first layer and of the optimizer."""
    layers: list[Any] = [layer for chunk in chunks_of(model) for layer in chunk.decoder.layers]
    attentions = [layer.self_attention for layer in layers]
    norms = [type(module) for module in model.modules() if type(module).__name__.endswith("Norm")]
    experts = [type(layer.mlp.experts) for layer in layers if hasattr(layer.mlp, "experts")]
    found: dict[str, Sequence[Any]] = {  # the first of each is told; a rank may have none
        "attention": [type(attention.core_attention) for attention in attentions],
        "linear": [type(attention.linear_proj) for attention in attentions],
        "norm": norms,
        "experts": experts,
        "optimizer": optimizer.kinds,
        "gradient norm": [clip_grads.l2_norm_impl],
    }
    names = {part: _name(candidates[0]) for part, candidates in found.items() if candidates}
    fused = chunks_of(model)[0].config.gradient_accumulation_fusion
    return names | {"weight gradients": runtime.WEIGHT_GRADIENT_KERNEL if fused else "torch.matmul"}


def _name(what: Any) -> str:
    """`package.name` of a class or function; a compiled one may not know its package."""
    package = (getattr(what, "__module__", None) or "compiled").split(".")[0]
    return f"{package}.{getattr(what, '__name__', type(what).__name__)}"
