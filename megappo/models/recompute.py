"""Recompute where Megatron says nothing: modules that a model's layers have not, and embeddings that don't learn."""

import torch
from torch import Tensor, nn

from megappo.config.recompute import Recompute
from megappo.errors import ConfigError
from megappo.models.families.base import ModelShape


def check_recompute(shape: ModelShape, recompute: Recompute, *, has_fused_norms: bool) -> None:
    """ConfigError for modules that this model has not got. `has_fused_norms`: layers are Transformer Engine's, whose
    norms are a part of the linear layer behind them, and only a norm before experts stands alone."""
    if recompute.granularity != "selective":
        return
    moe = shape.moe
    has_mlp = moe is None or bool(moe.dense_layers)
    absent = {
        "mlp": "all layers of this model have experts; moe is their part" if not has_mlp else None,
        "moe": "this model is dense; mlp is its layers' part" if moe is None else None,
        "shared_experts": "this model has none" if moe is None or not moe.shared_ffn_size else None,
        "layernorm": "Transformer Engine's layers make norm and linear layer in one; leave it out, or set model.layers "
        "to torch"
        if has_fused_norms and moe is None
        else None,
    }
    for module in recompute.modules:
        reason = absent.get(module)
        if reason is not None:
            raise ConfigError(f"model.recompute_modules: {module}, but {reason}")


def keep_gradient_path(_: nn.Module, __: object, hidden: Tensor) -> Tensor:
    """A forward hook of the embedding. A recomputed layer has gradients only where its input has one (Megatron's
    checkpoint is torch's reentrant kind), which it has not where the embedding is frozen."""
    is_missing = torch.is_grad_enabled() and not hidden.requires_grad
    return hidden.requires_grad_() if is_missing else hidden
