"""`apex.multi_tensor_apply`: hands lists of tensors to a kernel."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


def multi_tensor_applier(
    kernel: Callable[..., Any], overflow: Tensor, tensors: Sequence[Sequence[Tensor]], *args: Any
) -> Any:
    """`kernel(chunk size, overflow, tensors, …)`."""
    return kernel(2048 * 32, overflow, tensors, *args)
