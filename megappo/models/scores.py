"""Attention scores and logits under a soft cap, c · tanh(x / c), as Gemma 2 has it. Torch alone."""

import math

import torch
from torch import Tensor


def softcapped(scores: Tensor, cap: float | None) -> Tensor:
    """`scores` kept between −cap and cap; None leaves them."""
    return scores if cap is None else cap * torch.tanh(scores / cap)


def softcapped_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float | None, cap: float
) -> Tensor:
    """[..., heads, queries, d] of the mixed values; key and value [..., KV heads, keys, d], a divisor of the heads.

    `visible` [..., queries, keys] bool, broadcast over heads: which keys a query sees, one at least. `scale` None is
    1 / sqrt(d). The cap is on the scaled scores, before the mask. All scores are in memory at once: O(queries · keys).
    """
    repeats = query.size(-3) // key.size(-3)
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=-3), value.repeat_interleave(repeats, dim=-3)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.size(-1)) if scale is None else scale)
    scores = softcapped(scores, cap).masked_fill(~visible, -torch.inf)
    return scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype) @ value
