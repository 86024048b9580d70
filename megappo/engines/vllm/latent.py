"""What vLLM makes of latent attention's up projection when it has loaded it: written anew after a transfer.

Its kernels decode on the cached latents themselves: keys' rows of `kv_b_proj` go to the queries (`W_UK_T`), those of
values to the output (`W_UV`). Seen with vLLM 0.32.0, where both are parameters of the attention, filled once after
loading; where they are views of `kv_b_proj` they need nothing. Nothing of vLLM is imported.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


def absorbing_modules(vllm_model: nn.Module) -> list[Any]:
    """The attention modules that have the two parts; none where a model has no such attention.

    Outer modules hold the projection too; the parts are where attention is computed.
    """
    return [module for module in vllm_model.modules() if hasattr(module, "W_UK_T") and hasattr(module, "W_UV")]


@torch.no_grad()
def absorb_up_projections(modules: Iterable[Any]) -> int:
    """Brings the two parts of `absorbing_modules` up to date with `kv_b_proj`, in their own memory, which captured
    graphs read; returns the bytes that were written. Nothing where the parts are `kv_b_proj`'s own memory."""
    written = 0
    for module in modules:
        key_part, value_part, weight = module.W_UK_T, module.W_UV, module.kv_b_proj.weight
        for part, made in zip((key_part, value_part), absorbed(weight, *key_part.shape[:2]), strict=True):
            assert part.shape == made.shape, f"vLLM keeps {tuple(part.shape)} of an up projection, not {made.shape}"
            if part.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
                part.copy_(made)
                written += part.nbytes
    return written


def absorbed(weight: Tensor, num_heads: int, key_size: int) -> tuple[Tensor, Tensor]:
    """`kv_b_proj` [heads · (key_size + value_size), rank] → views [heads, key_size, rank], [heads, rank, value_size],
    the heads being rows one after the other, in each the rows of its key (without the part for positions) first."""
    rows = weight.unflatten(0, (num_heads, -1))
    return rows[:, :key_size], rows[:, key_size:].transpose(1, 2)
