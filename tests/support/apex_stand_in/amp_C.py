"""Apex's `amp_C`: the two kernels over lists of tensors that Megatron calls."""

from collections.abc import Sequence

import torch
from torch import Tensor


def multi_tensor_l2norm(
    chunk: int, overflow: Tensor, tensors: Sequence[Sequence[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """[1] float32, the norm of all tensors of the first list."""
    assert not per_tensor
    return torch.stack([tensor.float().norm() for tensor in tensors[0]]).norm().reshape(1), None


def multi_tensor_scale(chunk: int, overflow: Tensor, tensors: Sequence[Sequence[Tensor]], scale: float) -> None:
    """Writes the tensors of the first list, times `scale`, into those of the second."""
    for source, target in zip(*tensors, strict=True):
        target.copy_(source * scale)
