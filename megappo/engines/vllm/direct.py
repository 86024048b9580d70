"""Weights into vLLM without its loader: its parameters are the training shards' memory, or are written in place.

For engines whose parameters stay as the model declares them: unquantised models on GPUs, with Triton's kernels for
experts. On a CPU vLLM packs its weights; `plain_parameters` keeps it from that, which is slower.
"""

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from megappo.config.grid import GenerationGrid
from megappo.engines.hybrid.execute import Moved, Switch
from megappo.engines.hybrid.kinds import Kinds, with_numbers
from megappo.engines.hybrid.plan import Planner
from megappo.engines.hybrid.sources import TrainingShards
from megappo.engines.rollout import WorstTensor
from megappo.engines.vllm.destination import VLLMDestination
from megappo.engines.vllm.environment import has_latent_kernels
from megappo.engines.vllm.latent import absorb_up_projections, absorbing_modules
from megappo.engines.vllm.patches import replaced
from megappo.engines.vllm.targets import VLLMTargets
from megappo.engines.vllm.transfer import SleepLevel
from megappo.models.architecture import ModelSpec
from megappo.parallel.mesh import Mesh

LEAST_ELEMENTS = 1 << 12
"""Of a tensor that is taken for a parameter, while a model is built."""


class DirectTransfer:
    """Carries out a plan from this rank's training stage to its vLLM model; every rank of the world makes the same.

    `bucket_bytes` bounds what is under way at once; `expert_parallel` is whether vLLM spreads whole experts.
    """

    sleep_level: SleepLevel = 2
    copies_all = False

    def __init__(
        self,
        stage: nn.Module,
        spec: ModelSpec,
        mesh: Mesh,
        grid: GenerationGrid,
        *,
        expert_parallel: bool,
        bucket_bytes: int,
    ) -> None:
        weight_map = spec.family.weight_map(spec.shape, "lm")
        kinds = Kinds.of(weight_map)
        self._mesh = mesh
        self._sources = TrainingShards(stage, weight_map)
        self._sources.refresh()  # merged copies are made here: what is made while vLLM starts is freed when it sleeps
        self._targets = VLLMTargets(
            kinds, spec.shape, grid, expert_parallel=expert_parallel, latent_kernels=has_latent_kernels()
        )
        self._switch: Switch | None = None
        self._absorbing: list[Any] = []
        self.planner = Planner(
            kinds,
            grid.training,
            self._targets,
            layers_of_stages=mesh.stage_layers(spec.shape.num_layers),
            element_bytes=next(stage.parameters()).element_size(),
            bucket_bytes=bucket_bytes,
            generation_tp=grid.tp,
            grouped_experts=self._sources.has_grouped_experts,
        )

    @property
    def description(self) -> str:
        way = "directly: its parameters are training's memory where they can be, and written in place elsewhere"
        return f"{way}; {self.planner.description}"

    def load(self, vllm_model: nn.Module) -> None:
        """vLLM's model loader: binds what is aliased, fills the rest; AssertionError where a parameter has no plan."""
        destination = VLLMDestination(vllm_model, self._mesh.device)
        names = {
            with_numbers(target.name, layer) for target in self._targets.of(self._mesh.rank) for layer in target.layers
        }
        planned = {id(destination.parameter(name)) for name in names}
        missing = [name for name, parameter in vllm_model.named_parameters() if id(parameter) not in planned]
        assert not missing, f"no plan for vLLM's {', '.join(missing[:3])} of {len(missing)}; use hybrid.weights=load"
        self._made(vllm_model).run()
        for name, buffer in vllm_model.named_buffers():
            assert not buffer.is_meta, f"vLLM's buffer {name} was taken for a parameter; use hybrid.weights=load"

    def transfer(self, vllm_model: nn.Module, worker: Any) -> Moved:
        """Sends the weights as they are now; returns the bytes by kind."""
        # Made after vLLM has laid the weights out: from here on their memory stays where it is, also over a sleep.
        if self._switch is None:
            self._switch = self._made(vllm_model)
            self._absorbing = absorbing_modules(vllm_model)  # looked for once: a model has hundreds of modules
        self._sources.refresh()
        moved = self._switch.run()
        moved.copied += absorb_up_projections(self._absorbing)
        return self._sources.with_copies_counted(moved, self.planner, self._mesh.rank)

    @contextmanager
    def starting(self) -> Iterator[None]:
        with plain_parameters(), without_memory():
            yield

    def worst_tensor(self) -> WorstTensor | None:
        assert self._switch is not None, "nothing was transferred yet"
        return self._switch.worst_tensor()

    def _made(self, vllm_model: nn.Module) -> Switch:
        destination = VLLMDestination(vllm_model, self._mesh.device)
        return Switch(self.planner, self._mesh.rank, self._sources, destination, self._mesh.world_group)


@contextmanager
def plain_parameters() -> Iterator[None]:
    """While inside, an engine that starts on a CPU keeps its parameters as they are and computes with them, by torch's
    own kernels (vLLM 0.32.0 packs them into kernels' handles and forgets them)."""
    with ExitStack() as stack:
        if runtime.on_cpu:
            from vllm.model_executor.layers import utils
            from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

            # The modules keep what they were given here, also when the names are restored.
            stack.enter_context(replaced(utils, "dispatch_cpu_unquantized_gemm", lambda _: _keep_plain))
            stack.enter_context(
                replaced(CPUUnquantizedExperts, "process_weights_after_loading", lambda _: _keep_plain_experts)
            )
        yield


class _OnMeta(TorchFunctionMode):
    """Gives large uninitialised tensors, which parameters are made of, no memory."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is not torch.empty or kwargs.get("device") is not None:
            return function(*args, **kwargs)
        made = function(*args, **kwargs | {"device": "meta"})
        is_parameter = made.is_floating_point() and made.numel() >= LEAST_ELEMENTS
        return made if is_parameter else function(*args, **kwargs)


@contextmanager
def without_memory() -> Iterator[None]:
    """While inside, a model of vLLM is built without memory for its parameters, which they get from `load`.

    Otherwise the weights would exist twice for a moment, and vLLM, which counts what it had taken for its weights as
    free afterwards, would give that much more to its cache (0.20.2).
    """
    from vllm.model_executor.model_loader import base_loader

    def building(initialize: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        def initialized(*args: Any, **kwargs: Any) -> nn.Module:
            with _OnMeta():
                return initialize(*args, **kwargs)

        return initialized

    with replaced(base_loader, "initialize_model", building):
        yield


def _keep_plain(layer: nn.Module, remove_weight: bool) -> None:
    if layer.weight.ndim == 2:  # type: ignore[operator]
        layer.cpu_linear = F.linear  # type: ignore[assignment]  # called with the weight of the moment


def _keep_plain_experts(experts: Any, *_: Any) -> None:
    experts.apply = partial(_apply_experts, experts)


def _apply_experts(
    experts: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *_: Any,
    **__: Any,
) -> None:
    """SwiGLU experts: `output` [tokens, H] becomes the weighted sum of each token's experts. vLLM names its arguments:
    `w1` is a layer's w13_weight, `w2` its w2_weight."""
    output.zero_()
    for expert in range(len(w1)):
        tokens, place = (topk_ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(hidden_states[tokens], w1[expert]).chunk(2, dim=-1)
        made = F.linear(F.silu(gate) * up, w2[expert])
        output.index_add_(0, tokens, made * topk_weights[tokens, place, None].to(made.dtype))
