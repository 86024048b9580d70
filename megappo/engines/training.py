"""Runs one model over micro-batches with Megatron's schedules: forward passes, and updates with DDP and the optimizer.

What is computed from the model's output is passed in as a function, so that this file knows no role and no loss.
"""

from __future__ import annotations

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor

from megappo.engines.offload import RoleMemory, no_memory
from megappo.engines.optimizer import Optimizer, WrappedChunks
from megappo.engines.routing import ExpertRouting, RouterCoefficients, loads_of, routing_of
from megappo.experience.cut import empty_like
from megappo.experience.micro import MicroBatch
from megappo.experience.packed import PackedMicroBatch
from megappo.models.chunks import ModelChunks
from megappo.models.lora import adapters_off, dropping_inputs
from megappo.models.router import Router
from megappo.parallel.collectives import broadcast_from_last_stage, sum_over
from megappo.parallel.mesh import Mesh

PerToken = Callable[[Tensor, MicroBatch], Tensor]
"""From the last stage's output ([b, s / cp, vocab / tp] logits or [b, s / cp, 1] values) to one float32 a token of the
whole sequences, [b, s]."""


@dataclass(frozen=True)
class LossTerm:
    """A micro-batch's share of the global loss, and of each metric in the order of `Loss.metrics`.

    Shares are already divided by global denominators: their sum over micro-batches and data-parallel ranks is the
    value.
    """

    loss: Tensor
    metrics: tuple[Tensor, ...]


class Loss(Protocol):
    """From the last stage's output and the micro-batch to its share of the loss."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics, needed on the stages that compute no loss too."""
        ...

    def __call__(self, output: Tensor, micro: MicroBatch) -> LossTerm: ...


class ModelEngine:
    """A model (this rank's stage) that is only run forward: the reference, and the base of the trained ones."""

    def __init__(self, model: torch.nn.Module, mesh: Mesh, memory: RoleMemory | None = None) -> None:
        self.model = model
        self.mesh = mesh
        self.memory = memory or no_memory()
        self._chunks = list(model.chunks) if isinstance(model, ModelChunks | WrappedChunks) else [model]
        self._schedule = get_forward_backward_func()
        shared = routing_of(model)
        self.routing = ExpertRouting(shared, mesh) if shared is not None else None

    def per_token(self, micros: Sequence[MicroBatch], compute: PerToken) -> Tensor:
        """Runs `compute` on the output for every micro-batch, without gradients.

        Returns the flat [tokens] float32 results of all micro-batches in order, on the CPU, equal on every rank of the
        sequence group.
        """

        def collect(output: Tensor, micro: MicroBatch) -> Tensor:
            return micro.flat(compute(output, micro))

        self.memory.need("params")
        with torch.no_grad():
            pieces = self._run(micros, collect, forward_only=True)
        total = sum(micro.rows.num_tokens for micro in micros)
        flat = torch.cat(pieces) if self.mesh.is_last_stage else None
        return broadcast_from_last_stage(flat, self.mesh, (total,), torch.float32).cpu()

    def logits_of(self, micros: Sequence[MicroBatch]) -> Callable[[MicroBatch], Tensor]:
        """For a pass of *another* model over `micros` that compares whole distributions: the function that gives its
        last stage this model's logits of each, [b, length, vocab / tp], without gradients.

        One stage runs when asked. Of several, none can run the others in the middle of a schedule: all run here, and
        the last keeps what its output layer takes, [length, b, hidden] of each micro-batch, tp times less under
        sequence parallelism. All ranks of the model-parallel group call it.
        """
        self.memory.need("params")
        if self.mesh.pp == 1:
            return self._logits_now
        inputs: list[Any] = []
        with contextlib.ExitStack() as stack, torch.no_grad():
            if self.mesh.is_last_stage:
                layer = get_attr_wrapped_model(self._chunks[-1], "output_layer")
                hook = layer.register_forward_pre_hook(lambda _, *given: inputs.append(given), with_kwargs=True)
                stack.callback(hook.remove)
            self._run(micros, lambda output, micro: None, forward_only=True)
        by_micro = dict(zip(map(id, micros), inputs, strict=False))

        def logits(micro: MicroBatch) -> Tensor:
            positional, named = by_micro[id(micro)]
            with torch.no_grad():
                output, _ = layer(*positional, **named)
            return output.transpose(0, 1)  # type: ignore[no-any-return]

        return logits

    def _logits_now(self, micro: MicroBatch) -> Tensor:
        with contextlib.ExitStack() as stack, torch.no_grad():
            if self.routing is not None:  # of a model with adapters also that of the pass under way
                stack.enter_context(self.routing.shared.interrupted())
                self.routing.begin(micro, is_update=False)
            output: Tensor = self.model(*self._inputs(micro), **_packing(micro))
        return output

    def _inputs(self, micro: MicroBatch) -> tuple[Tensor, Tensor, None]:
        """Token ids and positions [b, s / cp], and no mask."""
        assert micro.context.size == self.mesh.cp, "a micro-batch is cut over the context-parallel ranks of its engine"
        return micro.local(micro.token_ids), micro.local(micro.position_ids), None

    def _run(
        self, micros: Sequence[MicroBatch], on_output: Callable[[Tensor, MicroBatch], Any], *, forward_only: bool
    ) -> list[Any]:
        """One pass of Megatron's schedule; returns what `on_output` gave for each micro-batch (last stage only).

        The interleaved schedule of virtual stages wants a multiple of `pp` micro-batches: what is missing is filled up
        with ones of a single token, which `on_output` does not see.
        """
        num_given, chunks = len(micros), self._chunks
        if len(chunks) > 1:
            fillers = -num_given % self.mesh.pp
            micros = [*micros, *[empty_like(micros[0], self.mesh.sequence_alignment)] * fillers]

        def forward_step(iterator: Any, model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            place, micro = next(iterator)
            is_given = place < num_given
            if self.routing is not None:
                self.routing.begin(micro, is_update=not forward_only, counts=is_given)
            output = model(*self._inputs(micro), **_packing(micro))
            # With `non_loss_data` the schedule only collects; otherwise the result is the triple of a per-token loss.
            return output, lambda out, non_loss_data=False: on_output(out, micro) if is_given else _no_share(out)

        results: list[Any] = self._schedule(
            forward_step_func=forward_step,
            data_iterator=[enumerate(micros) for _ in chunks] if len(chunks) > 1 else enumerate(micros),
            model=chunks,
            num_microbatches=len(micros),
            seq_length=max(micro.length for micro in micros),
            micro_batch_size=len(micros[0].token_ids),
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        return results[:num_given]


def _no_share(output: Tensor) -> tuple[Tensor, Tensor, None]:
    """The triple of a micro-batch that has no part in the loss."""
    return output.float().sum() * 0, torch.zeros((), dtype=torch.int, device=output.device), None


class BaseEngine(ModelEngine):
    """A model with low-rank adapters as it was without them: a reference that is no second copy in memory."""

    def _logits_now(self, micro: MicroBatch) -> Tensor:
        with adapters_off(self.model):
            return super()._logits_now(micro)

    def _run(
        self, micros: Sequence[MicroBatch], on_output: Callable[[Tensor, MicroBatch], Any], *, forward_only: bool
    ) -> list[Any]:
        assert forward_only, "the frozen weights are not trained"
        with adapters_off(self.model):
            return super()._run(micros, on_output, forward_only=forward_only)


def _packing(micro: MicroBatch) -> dict[str, Any]:
    """What tells the model where packed sequences begin and end, in the whole row under context parallelism too."""
    if not isinstance(micro, PackedMicroBatch):
        return {}
    ends = micro.boundaries
    longest = int(ends.diff().max())
    return {
        "packed_seq_params": PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest
        )
    }


@dataclass(frozen=True)
class UpdateReport:
    """One optimizer step: the loss's metrics (global values), the gradient norm before clipping, the rate used."""

    metrics: dict[str, float]
    grad_norm: float
    learning_rate: float
    routing: dict[str, float] = field(default_factory=dict)
    """`router_…` of a model with experts."""


class TrainingEngine(ModelEngine):
    """A model that is trained: the same passes, and updates."""

    def __init__(self, mesh: Mesh, optimizer: Optimizer, router: RouterCoefficients | None = None) -> None:
        super().__init__(optimizer.wrapped, mesh, optimizer.memory)
        self.optimizer = optimizer
        self._router = router or RouterCoefficients()

    def update(self, micros: Sequence[MicroBatch], loss: Loss) -> UpdateReport:
        """One optimizer step on a minibatch, of which `micros` are this data-parallel rank's part.

        Gradients are summed over micro-batches and ranks as they are: the shares of `loss` have global denominators.
        """

        def share(output: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor]:
            term = loss(output, micro)
            assert len(term.metrics) == len(loss.metrics), "a loss gives one value for each of its metrics"
            values = torch.stack([value.detach().double() for value in term.metrics])
            # A triple tells the schedule that the loss is normalised: it is neither divided by the number of
            # micro-batches nor, because the count is 0 and the finalizer drops it, by tokens (megatron-core 0.16-0.19).
            return term.loss, torch.zeros((), dtype=torch.int, device=output.device), values

        self.optimizer.zero_grad()
        self._prepare_routers(micros)
        with dropping_inputs(self.model):
            shares = self._run(micros, share, forward_only=False)
        metrics = self._global_metrics(shares, loss.metrics)
        routing, loads = {}, None
        if self.routing is not None:
            statistics = self.routing.statistics()
            routing, loads = statistics.metrics, statistics.loads.clone()
            self.routing.shared.reset()
        learning_rate = self.optimizer.learning_rate
        norm = self.optimizer.step()
        return UpdateReport(metrics, norm, learning_rate, routing | self._move_biases(loads))

    def _move_biases(self, loads: Tensor | None) -> dict[str, float]:
        """After a step that was taken: of routers with biases that are to be balanced. `router_max_bias`."""
        if self.routing is None or loads is None or not (self._router.bias_rate and self.routing.shared.moe.has_bias):
            return {}
        routers = [module for chunk in self._chunks for module in chunk.modules() if isinstance(module, Router)]
        return {"router_max_bias": self.routing.move_biases(routers, loads, self._router.bias_rate)}

    def _prepare_routers(self, micros: Sequence[MicroBatch]) -> None:
        """Their losses need to know how the whole minibatch loads the experts before the first backward: from the
        choices that are taken over, or from a pass without gradients."""
        if self.routing is None:
            return
        self.routing.shared.reset()
        if not (self._router.balance or self._router.z):
            return
        if self.routing.takes_over and self.routing.is_complete:
            recorded = [micro.rows.get("routed_experts") for micro in micros]
            loads = loads_of(recorded, self.routing.shared.moe.num_experts)
            loads = sum_over(self.mesh.dp_group, self.mesh.device)(loads)
        else:
            with torch.no_grad():
                self._run(micros, lambda output, micro: None, forward_only=True)
            loads = self.routing.statistics().loads.clone()
            self.routing.shared.reset()
        self.routing.shared.losses = self.routing.losses(self._router, loads)

    def _global_metrics(self, shares: Sequence[Tensor], names: tuple[str, ...]) -> dict[str, float]:
        """Sums the [metrics] float64 shares of all micro-batches and data-parallel ranks; known to every stage."""
        total = None
        if self.mesh.is_last_stage:
            total = sum_over(self.mesh.dp_group, self.mesh.device)(torch.stack(list(shares)).sum(0))
        total = broadcast_from_last_stage(total, self.mesh, (len(names),), torch.float64)
        return dict(zip(names, total.tolist(), strict=True))
