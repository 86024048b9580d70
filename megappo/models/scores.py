"""Attention scores and logits under a soft cap, c · tanh(x / c), as Gemma 2 has it, and windows. Torch alone."""

import math

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

BLOCK = 512
"""Queries whose scores are in memory at once."""


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
    exact = torch.promote_types(scores.dtype, torch.float32)
    return scores.softmax(dim=-1, dtype=exact).to(value.dtype) @ value


def causal_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, cap: float | None,
    dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """[b, heads, queries, d] of the mixed values; key and value [b, KV heads, keys, d], a divisor of the heads.

    The queries are the last of the keys' positions, and see no later key; with `window` only that many, their own
    included. `cap` as in `softcapped_attention`. Where a mask has to be written out there is one for BLOCK queries at a
    time, and what they see; the backward pass makes it anew, and their scores with it: O(BLOCK · keys) in memory.
    """
    num_queries, num_keys = query.size(2), key.size(2)
    before = num_keys - num_queries
    if cap is None and (window is None or window >= num_keys) and before == 0:
        return _attention(query, key, value, None, scale, cap, dropout)

    def block(query: Tensor, key: Tensor, value: Tensor, distance: int) -> Tensor:
        """`distance`: of the first query to the first key."""
        own = distance + torch.arange(query.size(2), device=query.device)
        back = own[:, None] - torch.arange(key.size(2), device=query.device)[None]
        visible = (back >= 0) & (back < (window or num_keys))
        return _attention(query, key, value, visible, scale, cap, dropout)

    mixed = []
    for start in range(0, num_queries, BLOCK):
        stop = min(start + BLOCK, num_queries)
        first = 0 if window is None else max(before + start - window + 1, 0)
        seen = slice(first, before + stop)
        parts = query[:, :, start:stop], key[:, :, seen], value[:, :, seen], before + start - first
        if num_queries > BLOCK and torch.is_grad_enabled():
            mixed.append(checkpoint(block, *parts, use_reentrant=False, preserve_rng_state=dropout > 0))
        else:
            mixed.append(block(*parts))
    return mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float | None, cap: float | None,
    dropout: float,
) -> Tensor:  # fmt: skip
    """`visible` [queries, keys]; None is causal."""
    if cap is not None:
        assert visible is not None, "a soft cap is computed with a mask that is written out"
        return softcapped_attention(query, key, value, visible, scale, cap)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, is_causal=visible is None, dropout_p=dropout, scale=scale,
        enable_gqa=key.size(1) != query.size(1),
    )  # fmt: skip
