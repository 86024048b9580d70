"""Apex's extension of this name: a weight's gradient is added to the buffer that DDP keeps."""

from torch import Tensor

calls = 0


def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
    """Adds `grad_output`ᵀ · `total_input`, [out, in], to the float32 `main_grad`."""
    global calls
    calls += 1
    main_grad.addmm_(grad_output.t().float(), total_input.float())
