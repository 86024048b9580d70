"""Which experts a token goes to, and with which weights: the arithmetic that training and generation share.

Torch alone; the module in Megatron's place is in `router.py`, that of generation layouts in
`engines/native/piece_experts.py`.
"""

import torch
from torch import Tensor

from megappo.models.families.base import MoeShape


def expert_scores(moe: MoeShape, logits: Tensor) -> Tensor:
    """[tokens, experts] float32 logits of the router → the scores that weights are made of."""
    return logits.softmax(dim=1)


def best_experts(moe: MoeShape, scores: Tensor) -> Tensor:
    """[tokens, top_k] int64: the router's own choice."""
    return scores.topk(moe.top_k, dim=1).indices


def expert_weights(moe: MoeShape, scores: Tensor, experts: Tensor) -> Tensor:
    """[tokens, top_k]: what the outputs of `experts` [tokens, top_k] are multiplied with, whoever chose them."""
    weights = scores.gather(1, experts)
    return weights / weights.sum(dim=1, keepdim=True) if moe.norm_topk_prob else weights


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
