"""The router of Megatron's MoE layers, and what all routers of a stage share: choices taken over, recorded and counted.

Which tokens a rank holds, and where choices come from and go to, is for the engines to say (`engines/routing.py`); the
arithmetic is in `routing.py`.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megappo.models.families.base import MoeShape
from megappo.models.routing import NO_EXPERT, best_experts, expert_scores, expert_weights, num_changed, score_shares

Recorder = Callable[[int, Tensor], None]
"""Told of each layer with experts (numbered among those of the model) the experts [tokens, top_k] of a forward."""


@dataclass(frozen=True)
class RouterLosses:
    """The losses of the routers on one minibatch, in shares of global means: any cut of it gives the same gradient.

    Balance, of each layer (Switch Transformer, arXiv 2101.03961): experts / (top_k · N²) · Σ_e c_e · Σ_t p_te over its
    N tokens, with c_e the tokens that expert e gets; 1 where all get alike. z (ST-MoE, arXiv 2202.08906): the mean over
    tokens of logsumexp(logits)². Each is summed over layers, as Megatron does.

    `pull` [layers, experts]: coefficient · experts · c / (top_k · N²); `z_share`: coefficient / N.
    """

    pull: Tensor
    z_share: float


@dataclass
class MicroRouting:
    """A micro-batch as this rank's routers see it.

    `is_token` [local tokens] bool, false in padding. `taken` [local tokens, layers, top_k]: choices to take over, -1
    where the router chooses itself; None is that everywhere. `experts`: what was chosen, by layer, where `keeps`.
    """

    is_token: Tensor
    taken: Tensor | None = None
    keeps: bool = False
    experts: dict[int, Tensor] = field(default_factory=dict)


class Routing:
    """What the routers of a stage share. `layers`: those of the model with experts, counted over the model.

    `statistics` [layers, 2 · experts + 2] float64, sums over this rank's tokens: tokens that each expert gets, scores
    of each expert, squared logsumexp of the logits, and choices that were taken over against the router's own.
    """

    def __init__(self, moe: MoeShape, layers: tuple[int, ...]) -> None:
        self.moe = moe
        self.layers = layers
        self.losses: RouterLosses | None = None
        self.recorder: Recorder | None = None
        self._micro: MicroRouting | None = None
        self._is_update = False
        # Micro-batches whose layers ran without gradients in an update, and will run again before their backward.
        self._again: defaultdict[int, deque[MicroRouting]] = defaultdict(deque)
        self.statistics = torch.zeros(len(layers), 2 * moe.num_experts + 2, dtype=torch.float64)

    def begin(self, micro: MicroRouting | None, *, is_update: bool = False) -> None:
        """The next forward is that of `micro`; None: of tokens that nobody asks about."""
        self._micro = micro
        self._is_update = is_update

    def reset(self) -> None:
        """Forgets the last pass."""
        self._micro, self._is_update, self.losses = None, False, None
        self._again.clear()
        self.statistics.zero_()

    def add(self, layer: int, sums: Tensor) -> None:
        """Adds to the statistics of a layer, which stay on the device where they are made."""
        self.statistics = self.statistics.to(sums.device)
        self.statistics[layer] += sums

    def current(self, layer: int) -> tuple[MicroRouting | None, bool]:
        """The micro-batch that a router runs on, and whether this run is the one that counts.

        With recomputed activations a layer runs twice, the second time while a later micro-batch may be under way:
        Megatron's schedules go backward in the order in which they went forward.
        """
        if not self._is_update:
            return self._micro, True
        waiting = self._again[layer]
        if not torch.is_grad_enabled():
            assert self._micro is not None, "an update says which micro-batch is run"
            waiting.append(self._micro)
            return self._micro, False
        return (waiting.popleft() if waiting else self._micro), True


class Router(TopKRouter):
    """Scores in float32; the experts are the best ones, or those that the micro-batch brings along. No token is
    dropped.

    Weights, and so gradients, are those of the experts that were taken, whoever chose them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        shared: Routing,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        self.shared = shared
        if shared.moe.has_bias:
            # Megatron's own is a buffer, which its optimizer step would move: here it is a weight that nothing trains.
            bias = torch.zeros(shared.moe.num_experts, dtype=torch.float32)
            self.expert_bias = torch.nn.Parameter(bias, requires_grad=False)

    @property
    def place(self) -> int:
        """The number of this layer among those with experts."""
        return self.shared.layers.index(self.layer_number - 1)

    def forward(self, input: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """[s, b, H] → (weights [tokens, experts], 0 where a token does not go; the map of where it goes, bool)."""
        moe, place = self.shared.moe, self.place
        logits = self.gating(input).flatten(0, -2).float()
        scores = expert_scores(moe, logits)
        micro, counts = self.shared.current(place)
        own = best_experts(moe, scores.detach(), self.expert_bias)
        experts = self._taken(micro, own)
        weights = expert_weights(moe, scores, experts)
        probs = torch.zeros_like(scores).scatter(1, experts, weights)
        goes = torch.zeros_like(scores, dtype=torch.bool).scatter(1, experts, True)
        if self.shared.recorder is not None:
            self.shared.recorder(place, experts)
        if micro is not None and counts:
            if micro.keeps:
                micro.experts[place] = experts
            probs = self._with_losses(probs, logits, scores, micro)
            self._count(logits, scores, goes, num_changed(own, experts), micro)
        return probs, goes

    def _taken(self, micro: MicroRouting | None, own: Tensor) -> Tensor:
        if micro is None or micro.taken is None:
            return own
        taken = micro.taken[:, self.place].to(own)
        return torch.where(taken == NO_EXPERT, own, taken)

    def _with_losses(self, probs: Tensor, logits: Tensor, scores: Tensor, micro: MicroRouting) -> Tensor:
        losses = self.shared.losses
        if losses is None or not torch.is_grad_enabled():
            return probs
        balance = (
            torch.where(micro.is_token[:, None], score_shares(self.shared.moe, scores), 0.0) @ losses.pull[self.place]
        )
        share = balance.sum()
        if losses.z_share:
            squares = torch.where(micro.is_token, logits.logsumexp(dim=1), 0.0).square()
            share = share + losses.z_share * squares.sum()
        return _WithShare.apply(probs, share)  # type: ignore[no-any-return]

    @torch.no_grad()
    def _count(self, logits: Tensor, scores: Tensor, goes: Tensor, changed: Tensor, micro: MicroRouting) -> None:
        # Without indexing and on the device of the scores: a GPU would be waited for in every layer.
        here, shares = micro.is_token, score_shares(self.shared.moe, scores)
        squares = logits.double().logsumexp(dim=1).square()
        sums = [
            (goes & here[:, None]).sum(0),
            torch.where(here[:, None], shares, 0.0).double().sum(0),
            torch.where(here, squares, 0.0).sum()[None],
            (changed & here).sum()[None],
        ]
        self.shared.add(self.place, torch.cat([part.double() for part in sums]))


class _WithShare(torch.autograd.Function):
    """A tensor as it is, whose backward also starts at a share of the loss, with gradient 1."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, share: Tensor) -> Tensor:
        ctx.share = share.detach()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, torch.ones_like(ctx.share)
