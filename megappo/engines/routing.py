"""Between batches and the routers of a stage: which of a micro-batch's tokens this rank holds, the choices that are
taken over from the batch, those that are recorded for it, and what is counted."""

from __future__ import annotations

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from torch import Tensor, nn

from megappo.experience.micro import MicroBatch
from megappo.models.router import Capacity, MicroRouting, Router, RouterLosses, Routing
from megappo.models.routing import EXPERT_DTYPE, NO_EXPERT
from megappo.parallel.collectives import max_over, sum_over
from megappo.parallel.mesh import Mesh


@dataclass(frozen=True)
class RouterCoefficients:
    """Weights of the routers' losses (`RouterLosses`) beside the loss of an update, and how far a step moves the bias
    of an expert (`Router.move_bias`)."""

    balance: float = 0.0
    z: float = 0.0
    bias_rate: float = 0.0


def routing_of(model: nn.Module) -> Routing | None:
    """What the routers of a stage share, the model in Megatron's wrappers or not; None for a dense model."""
    inner: object = model
    while hasattr(inner, "module"):
        inner = inner.module
    return getattr(inner, "expert_routing", None)


def limit_experts(model: nn.Module, capacity: Capacity) -> None:
    """From now on the experts of an unwrapped model drop what is over their capacity; nothing for a dense one.

    Megatron's dispatcher hears of it too, for without a capacity it takes top_k rows of each token (0.19.2).
    """
    routing = routing_of(model)
    if routing is None:
        return
    routing.capacity = capacity
    for module in model.modules():
        if isinstance(module, MoELayer):
            module.token_dispatcher.config.moe_expert_capacity_factor = capacity.factor


NOT_HERE = -1
"""The place of tokens that other context-parallel ranks hold."""


@dataclass(frozen=True)
class LocalTokens:
    """Where a micro-batch's tokens stand on this rank, whose routers see [s / cp, b] tokens, and [s / cp / tp, b] under
    sequence parallelism.

    `is_here` [tokens of the rows] bool; `places` [those that are here]: their numbers among the `count` local ones.
    """

    is_here: Tensor
    places: Tensor
    count: int

    @classmethod
    def of(cls, micro: MicroBatch, mesh: Mesh) -> LocalTokens:
        """Of the rank's part of a micro-batch, which context and sequence parallelism have cut, in this order."""
        batch, length = micro.token_ids.shape
        flat = micro.flat(torch.arange(batch * length, device=mesh.device).view(batch, length))
        row, position = flat // length, flat % length
        if micro.context.size > 1:
            held = micro.local(torch.arange(length, device=mesh.device)[None])[0]
            place = torch.full((length,), NOT_HERE, device=mesh.device)
            place[held] = torch.arange(len(held), device=mesh.device)
            position, length = place[position], len(held)
        share = length // mesh.tp if mesh.sequence_parallel else length
        first = mesh.tp_rank * share if mesh.sequence_parallel else 0
        is_here = (position >= first) & (position < first + share)
        return cls(is_here, ((position - first) * batch + row)[is_here], share * batch)

    def is_token(self) -> Tensor:
        """[local tokens] bool: false in padding."""
        mask = torch.zeros(self.count, dtype=torch.bool, device=self.places.device)
        mask[self.places] = True
        return mask

    def scattered(self, per_token: Tensor) -> Tensor:
        """[tokens, layers, top_k] of the rows → [local tokens, layers, top_k], -1 in padding."""
        per_token = per_token.to(self.places.device)
        local = per_token.new_full((self.count, *per_token.shape[1:]), NO_EXPERT)
        local[self.places] = per_token[self.is_here]
        return local


class ExpertRouting:
    """The routers of one engine's stage. `takes_over`: micro-batches whose rows have `routed_experts` are routed so.
    `is_complete`: in an update they have those of every token, so that the load is known before it begins.
    """

    def __init__(self, shared: Routing, mesh: Mesh) -> None:
        self.shared = shared
        self.takes_over = False
        self.is_complete = False
        self._mesh = mesh
        self._kept: dict[int, tuple[MicroBatch, LocalTokens, MicroRouting]] | None = None

    def begin(self, micro: MicroBatch, *, is_update: bool, counts: bool = True) -> None:
        """The next forward of the stage, or of one of its chunks, is that of `micro`. `counts`: its tokens are
        asked about. The token of a micro-batch without sequences has no part in losses and statistics either way."""
        tokens = LocalTokens.of(micro, self._mesh)
        recorded = micro.rows.routed_experts if self.takes_over else None
        is_token = tokens.is_token()
        local = MicroRouting(
            is_token if counts and not micro.rows.is_nothing else torch.zeros_like(is_token),
            None if recorded is None else tokens.scattered(recorded),
            keeps=self._kept is not None and counts,
        )
        if self._kept is not None and counts:
            # Chunks of a rank run it one after another, and each has layers of its own.
            _, _, local = self._kept.setdefault(id(micro), (micro, tokens, local))
        self.shared.begin(local, is_update=is_update)

    def record(self) -> None:
        """Keeps the choices of the micro-batches that follow, until `recorded` asks for them."""
        self._kept = {}

    def recorded(self) -> Tensor:
        """[tokens of all rows, layers, top_k] int16, the same on every rank of the sequence group, which all call
        it: each has the tokens and layers that it holds."""
        kept, self._kept = self._kept, None
        assert kept is not None, "choices are asked for that were not recorded"
        mesh, shared = self._mesh, self.shared
        whole = []
        for micro, tokens, local in kept.values():
            experts = torch.full(
                (micro.rows.num_tokens, len(shared.layers), shared.moe.top_k), NO_EXPERT, dtype=torch.int32,
                device=mesh.device,
            )  # fmt: skip
            for layer, chosen in local.experts.items():
                experts[tokens.is_here, layer] = chosen[tokens.places].to(torch.int32)
            whole.append(experts)
        # No backend has a maximum of int16.
        return max_over(mesh.sequence_group, mesh.device)(torch.cat(whole)).to("cpu", EXPERT_DTYPE)

    def statistics(self) -> RoutingStatistics:
        """Of the last pass, over all ranks; a collective call over the world."""
        total = sum_over(self._mesh.world_group, self._mesh.device)(self.shared.statistics)
        return RoutingStatistics(total, self.shared.moe.num_experts, self.shared.moe.top_k)

    def move_biases(self, routers: Iterable[Router], loads: Tensor, rate: float) -> float:
        """Those of this rank's `routers`, after an optimizer step with `loads` [layers, experts]; the largest |bias| of
        all layers, a collective call over the world."""
        largest = [router.move_bias(loads, rate) for router in routers]
        highest = max_over(self._mesh.world_group, self._mesh.device)(torch.tensor(max(largest, default=0.0)))
        return float(highest)

    def losses(self, coefficients: RouterCoefficients, loads: Tensor) -> RouterLosses:
        """`loads` [layers, experts] float64: the tokens that each expert gets in the whole minibatch."""
        moe = self.shared.moe
        num_tokens = max(float(loads[0].sum()) / moe.top_k, 1.0)
        pull = coefficients.balance * moe.num_experts / (moe.top_k * num_tokens**2) * loads
        return RouterLosses(pull.to(self._mesh.device, torch.float32), coefficients.z / num_tokens)


@dataclass(frozen=True)
class RoutingStatistics:
    """Sums over the tokens of a pass, [layers, 2 · experts + 3] (`Routing.statistics`)."""

    sums: Tensor
    num_experts: int
    top_k: int

    @property
    def loads(self) -> Tensor:
        """[layers, experts]: tokens that each expert gets."""
        return self.sums[:, : self.num_experts]

    @property
    def metrics(self) -> dict[str, float]:
        """`router_…`: means over layers, and the largest load of an expert over the mean load, of the worst layer."""
        loads, scores = self.loads, self.sums[:, self.num_experts : 2 * self.num_experts]
        num_tokens = float(loads[0].sum()) / self.top_k
        if not num_tokens:
            return {}
        balance = self.num_experts / (self.top_k * num_tokens**2) * (loads * scores).sum(1)
        return {
            "router_aux_loss": float(balance.mean()),
            "router_z_loss": float(self.sums[:, -3].mean()) / num_tokens,
            "router_max_load": float((loads.max(1).values / loads.mean(1)).max()),
            "router_changed": float(self.sums[:, -2].mean()) / num_tokens,
            "router_dropped": float(self.sums[:, -1].mean()) / (self.top_k * num_tokens),
        }


def loads_of(experts: Sequence[Tensor], num_experts: int) -> Tensor:
    """[layers, experts] float64: how often each stands in [tokens, layers, top_k] numbers, -1 counting for none."""
    whole = torch.cat(list(experts)).long()
    counted = torch.zeros(whole.shape[1], num_experts + 1, dtype=torch.float64)
    flat = whole.transpose(0, 1).flatten(1) + 1
    return counted.scatter_add(1, flat, torch.ones(flat.shape, dtype=torch.float64))[:, 1:]
