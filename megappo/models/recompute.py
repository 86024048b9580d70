"""Recompute where Megatron says nothing: embeddings that don't learn."""

import torch
from torch import Tensor, nn


def keep_gradient_path(_: nn.Module, __: object, hidden: Tensor) -> Tensor:
    """A forward hook of the embedding. A recomputed layer has gradients only where its input has one (Megatron's
    checkpoint is torch's reentrant kind), which it has not where the embedding is frozen."""
    is_missing = torch.is_grad_enabled() and not hidden.requires_grad
    return hidden.requires_grad_() if is_missing else hidden
