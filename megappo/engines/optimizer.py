"""Megatron's DDP, optimizer and learning-rate schedule around one model."""

from __future__ import annotations

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megappo.config.offload import OffloadConfig
from megappo.config.optim import OptimConfig
from megappo.config.pipeline import PipelineSplit
from megappo.engines.offload import Kind, RoleMemory, Tensors, storages_of
from megappo.engines.optimizer_states import create_state, precision_settings
from megappo.engines.overlap import check_gathered, finish_gather, wrapped_chunks
from megappo.engines.sharded import ShardedMemory, ShardedModel
from megappo.models.chunks import ModelChunks, StageModel
from megappo.models.fits import refuse_stages_without_experts
from megappo.models.sharded import shards_of
from megappo.parallel import padded_buckets

# What a parameter group holds of the configuration; the schedule writes rate and weight decay into it anew.
_SETTINGS = ("max_lr", "min_lr", "betas", "eps")

NO_OFFLOAD = OffloadConfig()


class NonFiniteGradient(FloatingPointError):
    """The gradient norm of a minibatch is NaN or infinite; the weights were not changed."""


class Optimizer:
    """AdamW on the shards of one model, with its gradient buffers and its schedule.

    `total_steps` is the number of optimizer steps of the whole run: where the schedule ends unless configured.
    """

    def __init__(
        self, model: StageModel, config: OptimConfig, total_steps: int, offload: OffloadConfig = NO_OFFLOAD
    ) -> None:
        split = PipelineSplit(
            model.config.num_layers_in_first_pipeline_stage, model.config.num_layers_in_last_pipeline_stage
        )
        pp = model.config.pipeline_model_parallel_size
        virtual = model.layers_of_stages if isinstance(model, ModelChunks) else None
        refuse_stages_without_experts(model.config.moe_layer_freq, pp, split, virtual)
        shards = shards_of(model)
        # The optimizer of a cut model steps its own parts, float32, which are nobody else's.
        is_distributed = config.use_distributed_optimizer and shards is None
        dtype = model.config.params_dtype if shards is None else torch.float32
        self.chunks: list[DistributedDataParallel | ShardedModel]
        if shards is not None:
            self.chunks = [ShardedModel(shards)]
        else:
            self.chunks = list(wrapped_chunks(model, config))
        self.wrapped: DistributedDataParallel | ShardedModel | WrappedChunks = self.chunks[0]
        if isinstance(model, ModelChunks):
            self.wrapped = WrappedChunks(self.chunks, model)
        model.config.finalize_model_grads_func = _finalize
        no_sync = [chunk.no_sync for chunk in self.chunks]
        model.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=config.lr, min_lr=config.lr * config.min_lr_ratio,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0], adam_beta2=config.betas[1], adam_eps=config.eps, clip_grad=config.clip_grad,
                params_dtype=dtype, bf16=dtype == torch.bfloat16, use_distributed_optimizer=is_distributed,
                overlap_param_gather=config.overlap_param_gather, **precision_settings(config),
            ),
            self.chunks,
            use_gloo_process_groups=False,
        )  # fmt: skip
        if shards is not None:
            for part in self._optimizer.chained_optimizers:
                part.grad_stats_parallel_group = shards.mesh.world_group  # norms are summed over all parts
        model.config.grad_scale_func = self._optimizer.scale_loss
        self._schedule = _schedule(self._optimizer, config, total_steps)
        kinds: tuple[Kind, ...] = ("params", "grads", "optimizer")
        if shards is not None:
            kept: dict[Kind, Tensors] = {"grads": self._gradient_buffers, "optimizer": self._state_tensors}
            self.memory: RoleMemory = ShardedMemory(shards, kept)
            return
        self.memory = RoleMemory(
            {"params": model.parameters, "grads": self._gradient_buffers, "optimizer": self._state_tensors},
            [kind for kind in kinds if getattr(offload, kind)],
            next(model.parameters()).device,
            gather=lambda: finish_gather(self.chunks),
        )

    @property
    def learning_rate(self) -> float:
        """The rate that the next step uses."""
        return float(self._optimizer.param_groups[0]["lr"])

    @property
    def kinds(self) -> list[type[torch.optim.Optimizer]]:
        """The classes that step the shards: torch's AdamW, or Apex's or Transformer Engine's FusedAdam. None where
        nothing on this rank is trained."""
        return [type(inner) for inner in self._inner()]

    @property
    def num_steps(self) -> int:
        """Steps taken so far, over resumed runs too."""
        return int(self._schedule.num_steps)

    def zero_grad(self) -> None:
        self.memory.need("params", "grads")
        self.memory.begin("optimizer")  # it comes while the gradients are computed
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def step(self) -> float:
        """Clips, steps the weights and the schedule; returns the global gradient norm before clipping.

        Raises NonFiniteGradient on every rank alike, before any weight has changed.
        """
        self.memory.need("optimizer")
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if not torch.isfinite(torch.tensor(norm)):
            raise NonFiniteGradient(f"the gradient norm is {norm}: no weight was changed")
        _, _, _ = self._optimizer.step()
        # Of gradients in bfloat16 it has made float32 copies, which else wait for the next update (0.16.1, 0.19.2).
        self._optimizer.zero_grad()
        self._schedule.step(1)
        return norm

    def sharded_state(self, model_state: dict[str, Any], *, loading: bool, metadata: dict[str, Any]) -> dict[str, Any]:
        """What a checkpoint holds of this optimizer, as Megatron's sharded tensors."""
        padded_buckets.install()
        if loading:
            for inner in self._inner():
                create_state(inner)
        return {
            "optimizer": self._optimizer.sharded_state_dict(model_state, is_loading=loading, metadata=metadata),
            "schedule": self._schedule.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Moments and the number of steps come from the checkpoint; rates, their course and AdamW's constants stay
        those of the configuration, which may have changed (a longer run, another rate)."""
        # Before it is loaded: megatron-core 0.19 looks for a group with the very rates of ours.
        for ours in self._optimizer.param_groups[:1]:  # they are the same in all
            for group in _groups_of(state["optimizer"]):
                group.update({name: ours[name] for name in _SETTINGS if name in ours})
        self._optimizer.load_state_dict(state["optimizer"])
        self._schedule.load_state_dict(state["schedule"])

    def _gradient_buffers(self) -> Iterable[Tensor]:
        return [gradient for chunk in self.chunks for gradient in gradients_of(chunk)]

    def _state_tensors(self) -> Iterator[Tensor]:
        """AdamW's moments, and the parameters that it steps where they are not the model's own; a precision-aware one
        has these beside the moments."""
        own = storages_of(self.wrapped.parameters())
        for inner in self._inner():
            for state in inner.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor) and value.numel() > 1)
            for param in (param for group in inner.param_groups for param in group["params"]):
                if param.untyped_storage()._cdata not in own:
                    yield param

    def _inner(self) -> Iterator[torch.optim.Optimizer]:
        """Torch's own optimizers inside of Megatron's."""
        for part in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            inner = getattr(part, "optimizer", None)
            if isinstance(inner, torch.optim.Optimizer):
                yield inner


class WrappedChunks(torch.nn.Module):
    """The chunks of a rank with virtual stages, each in Megatron's DDP; `module` is the bare model, as a DDP has it."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], module: ModelChunks) -> None:
        super().__init__()
        self.module = module
        self.chunks = tuple(chunks)


def gradients_of(chunk: DistributedDataParallel | ShardedModel) -> Iterable[Tensor]:
    """The buffers that hold the gradients of one chunk on this rank."""
    if isinstance(chunk, ShardedModel):
        return chunk.gradients()
    return [buffer.grad_data for buffer in chunk.buffers + chunk.expert_parallel_buffers]


def _finalize(model: list[torch.nn.Module], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Megatron's reductions of gradients over ranks, without its division: losses here have global denominators."""
    check_gathered(model)
    finalize_model_grads(model, None, **options)


def _groups_of(state: Any) -> Iterator[dict[str, Any]]:
    """The parameter groups in the state of an optimizer, or of several that Megatron chains."""
    if isinstance(state, dict):
        yield from state.get("param_groups", ())
        for value in state.values():
            yield from _groups_of(value)


def _schedule(optimizer: Any, config: OptimConfig, total_steps: int) -> OptimizerParamScheduler:
    decay_steps = config.lr_decay_steps or total_steps
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.lr * config.min_lr_ratio,
        lr_warmup_steps=config.lr_warmup_steps,
        # Megatron wants the decay to end after the warm-up, also where a constant rate has no decay.
        lr_decay_steps=max(decay_steps, config.lr_warmup_steps + 1),
        lr_decay_style=config.lr_scheduler_type,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=1,
        wd_incr_style="constant",
        # A loaded checkpoint sets the number of steps alone.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
