"""A layer's experts in a generation layout: each rank computes those that it holds, for all tokens of its replica.

Nothing is sent from rank to rank but the sum of the outputs; every rank routes every token, alike.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megappo.engines.native.pieces import MLPPieces, PieceModule, gated, linear_columns, linear_rows
from megappo.models.families.base import MoeShape
from megappo.models.families.experts import EXPERTS_DOWN, EXPERTS_GATE_UP
from megappo.models.router import Routing
from megappo.models.routing import best_experts, expert_scores, expert_weights


class SharedExpertPieces(MLPPieces):
    """The expert that every token goes to, cut over the ranks like a dense part; `has_gate`: times a number a token."""

    def __init__(self, has_gate: bool) -> None:
        super().__init__()
        self._has_gate = has_gate

    def partial(self, hidden: Tensor) -> Tensor:
        output = super().partial(hidden)
        if not self._has_gate:
            return output
        return output * F.linear(hidden, self.whole("gate_weight")).sigmoid()


class RouterPieces(PieceModule):
    """Which experts a token goes to: what training's router does. `place` numbers the layers with experts."""

    def __init__(self, moe: MoeShape, place: int, routing: Routing) -> None:
        super().__init__()
        self._moe = moe
        self._place = place
        self._routing = routing

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, H] → (weights [tokens, top_k] float32, expert numbers [tokens, top_k])."""
        logits = F.linear(hidden.float(), self.whole("weight").float())
        scores = expert_scores(self._moe, logits)
        experts = best_experts(self._moe, scores, self.whole("expert_bias") if self._moe.has_bias else None)
        if self._routing.recorder is not None:
            self._routing.recorder(self._place, experts)
        return expert_weights(self._moe, scores, experts), experts


class ExpertsPieces(PieceModule):
    """In the place of Megatron's MoE layer: [T, 1, H] → the weighted sum of each token's experts, shared one too."""

    def __init__(self, moe: MoeShape, place: int, routing: Routing) -> None:
        super().__init__()
        self._num_experts = moe.num_experts
        self.router = RouterPieces(moe, place, routing)
        self.shared_experts = SharedExpertPieces(moe.has_shared_gate) if moe.shared_ffn_size else None

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """[T, 1, H] → [T, 1, H] and no bias, summed over the ranks of the replica."""
        flat = hidden.flatten(0, -2)
        output = self._routed(flat)
        if self.shared_experts is not None:
            output += self.shared_experts.partial(flat)
        return self.summed(output).view_as(hidden), None

    def _routed(self, tokens: Tensor) -> Tensor:
        """[tokens, H] → the outputs of this rank's experts, times their weights."""
        layer = self._name.removesuffix("mlp")
        gate_up, down = (self.weights.experts[layer + name] for name in (EXPERTS_GATE_UP, EXPERTS_DOWN))
        weights, experts = self.router(tokens)
        # Sorted by expert, so that one transfer tells where each expert's tokens are.
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=self._num_experts)
        shares = order.split(counts.tolist())
        output = torch.zeros_like(tokens)
        for expert, rows in gate_up.items():
            places = shares[expert]
            if not len(places):
                continue
            chosen = places // experts.shape[1]
            inner = gated(linear_rows(tokens[chosen], rows)) * weights.flatten()[places, None]
            output.index_add_(0, chosen, linear_columns(inner.to(tokens.dtype), down[expert]))
        return output
