"""The router of Megatron's MoE layers, and what all routers of a stage share: choices taken over, recorded and counted.

Which tokens a rank holds, and where choices come from and go to, is for the engines to say (`engines/routing.py`); the
arithmetic is in `routing.py`.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

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


@dataclass(frozen=True)
class Capacity:
    """How many tokens of a micro-batch an expert takes on a rank: `factor` · tokens · top_k / experts, rounded up.

    `policy`: which it keeps, those with the largest weights (`probs`) or the first (`position`). As Megatron's
    `apply_router_token_dropping` (0.16.1, 0.19.2), whose `position` keeps any: it asks `topk` for the first of equals.
    """

    factor: float
    policy: Literal["probs", "position"] = "probs"

    def kept(self, probs: Tensor, goes: Tensor, is_token: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
        """Weights and map [tokens, experts] without what is over; padding goes nowhere."""
        num_tokens, num_experts = probs.shape
        limit = min(math.ceil(self.factor * num_tokens * top_k / num_experts), num_tokens)
        goes = goes & is_token[:, None]
        if self.policy == "position":
            kept = goes & (goes.cumsum(0) <= limit)
        else:
            best = torch.where(goes, probs, -1.0).topk(limit, dim=0).indices
            kept = goes & torch.zeros_like(goes).scatter(0, best, True)
        return torch.where(kept, probs, 0.0), kept


class Routing:
    """What the routers of a stage share. `layers`: those of the model with experts, counted over the model.

    `statistics` [layers, 2 · experts + 3] float64, sums over this rank's tokens: tokens that choose each expert, scores
    of each expert, squared logsumexp of the logits, choices that were taken over against the router's own, and choices
    that a capacity dropped.
    """

    def __init__(self, moe: MoeShape, layers: tuple[int, ...]) -> None:
        self.moe = moe
        self.layers = layers
        self.losses: RouterLosses | None = None
        self.capacity: Capacity | None = None
        self.recorder: Recorder | None = None
        self._micro: MicroRouting | None = None
        self._is_update = False
        # Micro-batches whose layers ran without gradients in an update, and will run again before their backward.
        self._again: defaultdict[int, deque[MicroRouting]] = defaultdict(deque)
        self.statistics = torch.zeros(len(layers), 2 * moe.num_experts + 3, dtype=torch.float64)

    def begin(self, micro: MicroRouting | None, *, is_update: bool = False) -> None:
        """The next forward is that of `micro`; None: of tokens that nobody asks about."""
        self._micro = micro
        self._is_update = is_update

    def reset(self) -> None:
        """Forgets the last pass."""
        self._micro, self._is_update, self.losses = None, False, None
        self._again.clear()
        self.statistics.zero_()

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Room for a forward without gradients in the middle of a pass, which then goes on where it was: what is
        recomputed in its backward finds its own micro-batch, and nothing of the other forward is counted."""
        held = self._micro, self._is_update, self.statistics
        self.statistics = torch.zeros_like(self.statistics)
        try:
            yield
        finally:
            self._micro, self._is_update, self.statistics = held

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
    """Scores in float32; the experts are the best ones, or those that the micro-batch brings along. With a capacity an
    expert drops what is over in the micro-batches of training and log-prob passes.

    Weights, and so gradients, are those of the experts that were taken, whoever chose them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        is_mtp_layer: bool = False,
        *,
        shared: Routing,
    ) -> None:
        """`is_mtp_layer` comes from megatron-core 0.19, of layers that no model here has."""
        super().__init__(config=config, pg_collection=pg_collection)
        self.shared = shared
        if shared.moe.has_bias:
            # Megatron's own is a buffer, which its optimizer step would move: here it is a weight without a gradient.
            bias = torch.zeros(shared.moe.num_experts, dtype=torch.float32)
            self.expert_bias = torch.nn.Parameter(bias, requires_grad=False)

    @property
    def place(self) -> int:
        """The number of this layer among those with experts."""
        return self.shared.layers.index(self.layer_number - 1)

    @torch.no_grad()
    def move_bias(self, loads: Tensor, rate: float) -> float:
        """Balancing without a loss (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Wang et al. 2024, arXiv 2408.15664):
        an expert's bias goes up by `rate` where it got less than the mean load, and down where it got more.

        `loads` [layers, experts] float64: the tokens that each expert got in the whole step. Whole numbers, so that all
        ranks and layouts move alike. In place, for engines may use its memory. Returns the largest |bias|.
        """
        own = loads[self.place].to(self.expert_bias.device)
        self.expert_bias.add_((own.mean() - own).sign().to(self.expert_bias.dtype), alpha=rate)
        return float(self.expert_bias.abs().max())

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
        kept = goes
        if micro is not None and self.shared.capacity is not None:
            probs, kept = self.shared.capacity.kept(probs, goes, micro.is_token, moe.top_k)
        if micro is not None and counts:
            if micro.keeps:
                micro.experts[place] = experts
            probs = self._with_losses(probs, logits, scores, micro)
            self._count(logits, scores, goes, num_changed(own, experts), goes & ~kept, micro)
        return probs, kept

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
    def _count(
        self, logits: Tensor, scores: Tensor, goes: Tensor, changed: Tensor, dropped: Tensor, micro: MicroRouting
    ) -> None:
        # Without indexing and on the device of the scores: a GPU would be waited for in every layer.
        here, shares = micro.is_token, score_shares(self.shared.moe, scores)
        squares = logits.double().logsumexp(dim=1).square()
        sums = [
            (goes & here[:, None]).sum(0),
            torch.where(here[:, None], shares, 0.0).double().sum(0),
            torch.where(here, squares, 0.0).sum()[None],
            (changed & here).sum()[None],
            (dropped & here[:, None]).sum()[None],
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
