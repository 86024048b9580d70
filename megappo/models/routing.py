"""Which experts a token goes to, and with which weights: the arithmetic that training and generation share.

Torch alone; the module in Megatron's place is in `router.py`, that of generation layouts in
`engines/native/piece_experts.py`.
"""

import torch
from torch import Tensor

from megappo.models.families.base import MoeShape


def expert_scores(moe: MoeShape, logits: Tensor) -> Tensor:
    """[tokens, experts] float32 logits of the router → the scores that weights are made of."""
    return logits.softmax(dim=1) if moe.score == "softmax" else logits.sigmoid()


def best_experts(moe: MoeShape, scores: Tensor, bias: Tensor | None = None) -> Tensor:
    """[tokens, top_k] int64: the router's own choice, with the `bias` [experts] of each expert where it has one."""
    ranked = scores if bias is None else scores + bias
    if moe.top_groups < moe.num_groups:
        groups = ranked.unflatten(1, (moe.num_groups, -1))
        best = groups.topk(moe.best_of_group, dim=2).values.sum(2).topk(moe.top_groups, dim=1).indices
        is_open = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(1, best, True)
        ranked = groups.masked_fill(~is_open[..., None], -torch.inf).flatten(1)
    return ranked.topk(moe.top_k, dim=1).indices


def score_shares(moe: MoeShape, scores: Tensor) -> Tensor:
    """[tokens, experts] scores that sum to 1, which the balancing loss is about."""
    return scores if moe.score == "softmax" else scores / scores.sum(dim=1, keepdim=True)


def expert_weights(moe: MoeShape, scores: Tensor, experts: Tensor) -> Tensor:
    """[tokens, top_k]: what the outputs of `experts` [tokens, top_k] are multiplied with, whoever chose them."""
    weights = scores.gather(1, experts)
    if moe.norm_topk_prob:
        weights = weights / weights.sum(dim=1, keepdim=True)
    return weights * moe.scaling


def num_changed(own: Tensor, taken: Tensor) -> Tensor:
    """[tokens] bool: whether two choices [tokens, top_k] differ as sets."""
    return (own.sort(dim=1).values != taken.sort(dim=1).values).any(dim=1)


def moe_layers(moe: MoeShape, num_layers: int) -> tuple[int, ...]:
    """The layers with experts, counted over the model from 0."""
    return tuple(layer for layer in range(num_layers) if layer not in moe.dense_layers)


NO_EXPERT = -1
"""Stands where nothing was recorded: the router chooses itself."""
EXPERT_DTYPE = torch.int16
"""Numbers of experts as batches hold them."""
