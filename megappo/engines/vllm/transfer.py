"""How weights get into a vLLM engine: the protocol, and the way through vLLM's own loader.

Binding vLLM's parameters to the training shards is another way, in a file of its own.
"""

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

from torch import nn

from megappo.config.grid import GenerationGrid
from megappo.engines.hybrid.execute import Moved
from megappo.engines.hybrid.kinds import Kinds
from megappo.engines.hybrid.stream import hf_tensors
from megappo.engines.rollout import WorstTensor
from megappo.engines.vllm.environment import has_latent_kernels
from megappo.engines.vllm.loaded import LoadedWeights
from megappo.engines.vllm.targets import VLLMTargets
from megappo.errors import ConfigError
from megappo.models.architecture import ModelSpec
from megappo.parallel.mesh import Mesh

SleepLevel = int
"""vLLM's: 1 keeps the weights in host memory, 2 forgets them."""


class WeightTransfer(Protocol):
    """Gives the training weights to the engine. Every rank of the world calls `load` and `transfer` together."""

    @property
    def sleep_level(self) -> SleepLevel:
        """How deep the engine may sleep: 2 where `transfer` writes every weight that the engine owns."""
        ...

    @property
    def copies_all(self) -> bool:
        """Whether the engine needs nothing of training's memory after `transfer`."""
        ...

    @property
    def description(self) -> str:
        """How the weights travel, for a log."""
        ...

    def starting(self) -> AbstractContextManager[None]:
        """Surrounds the start of an engine."""
        ...

    def worst_tensor(self) -> WorstTensor | None:
        """The engine's parameter that is farthest from the training shards, or a note why none can be named; None where
        all are equal. Every rank of the world calls it together, after `transfer`."""
        ...

    def load(self, vllm_model: nn.Module) -> None:
        """Fills or binds the parameters of a new model, before vLLM lays them out for its kernels and captures
        graphs."""
        ...

    def transfer(self, vllm_model: nn.Module, worker: Any) -> Moved:
        """Makes the training weights of this moment the engine's; the engine is awake but for its cache."""
        ...


class LoadTransfer:
    """Streams whole tensors through vLLM's loader, which cuts, packs and quantises them as it always does.

    `stage` is this rank's training stage, a GPTModel. What vLLM has of them over `grid` afterwards is compared by
    `worst_tensor` alone; `expert_parallel` is whether it spreads whole experts, `quantization` what it rounds them to.
    """

    sleep_level: SleepLevel = 2
    copies_all = True
    description = "through its own loader, tensor by tensor"

    def __init__(
        self,
        stage: nn.Module,
        spec: ModelSpec,
        mesh: Mesh,
        grid: GenerationGrid,
        *,
        expert_parallel: bool,
        quantization: str | None,
    ) -> None:
        self._stage = stage
        self._spec = spec
        self._mesh = mesh
        self._grid = grid
        self._expert_parallel = expert_parallel
        self._quantization = quantization
        self._weight_bytes = 0
        self._vllm_model: nn.Module | None = None

    def starting(self) -> AbstractContextManager[None]:
        return nullcontext()

    def worst_tensor(self) -> WorstTensor | None:
        """Streams all tensors once more. Rounded ones are not compared, which the answer's note says."""
        assert self._vllm_model is not None, "nothing was transferred yet"
        if self._quantization is not None:
            note = (
                f"none can be named, for rollout.quantization {self._quantization} rounds them; leave it out in a run "
                "that should name it, or raise hybrid.check_limit where rounding alone is as large"
            )
            return WorstTensor(0.0, "", note)
        kinds = Kinds.of(self._spec.family.weight_map(self._spec.shape, "lm"))
        targets = VLLMTargets(
            kinds,
            self._spec.shape,
            self._grid,
            expert_parallel=self._expert_parallel,
            latent_kernels=has_latent_kernels(),
        )
        loaded = LoadedWeights(
            self._vllm_model,
            targets.of(self._mesh.rank),
            self._mesh.device,
            tied=self._spec.shape.tied,
            packs_experts=runtime.on_cpu,
        )
        return loaded.worst(hf_tensors(self._stage, self._spec, self._mesh, Moved()))

    def load(self, vllm_model: nn.Module) -> None:
        vllm_model.load_weights(hf_tensors(self._stage, self._spec, self._mesh, Moved()))  # type: ignore[operator]
        # Before vLLM packs them: on a CPU it takes the packed ones out of its parameters (0.32.0).
        self._weight_bytes = sum(parameter.nbytes for parameter in vllm_model.parameters())

    def transfer(self, vllm_model: nn.Module, worker: Any) -> Moved:
        """Streams the whole tensors, one at a time, through vLLM's loader. All ranks call it."""
        self._vllm_model = vllm_model
        for module in vllm_model.modules():
            # Otherwise vLLM takes the experts for laid out already, and computes with wrong ones (0.32.0).
            if hasattr(getattr(module, "quant_method", None), "moe_kernel"):
                module.quant_method.moe_kernel = None  # type: ignore[union-attr]
        moved = Moved()
        tensors = hf_tensors(self._stage, self._spec, self._mesh, moved)
        worker.reload_weights(weights_iterator=tensors, is_checkpoint_format=True)
        if self._spec.shape.tied:
            # A tied head is loaded with the embedding, but on a CPU it multiplies with a packed copy of its own, which
            # vLLM does not make anew (0.32.0). Gemma 2 has no head: its embedding multiplies too.
            head: Any = getattr(vllm_model, "lm_head", None)
            if head is not None:
                head.quant_method.process_weights_after_loading(head)
        left = next(tensors, None)
        assert left is None, f"vLLM's loader stopped before tensor {left and left[0]}: it does not take all of them"
        moved.copied = self._weight_bytes
        return moved


def chosen_way(weights: Literal["auto", "direct", "load"], quantization: str | None) -> Literal["direct", "load"]:
    """Direct where vLLM leaves its parameters as they are: on GPUs, without quantisation. ConfigError for `direct`
    into quantised parameters."""
    if weights == "auto":
        return "load" if runtime.on_cpu or quantization is not None else "direct"
    if weights == "direct" and quantization is not None:
        raise ConfigError(
            f"hybrid.weights: direct can't be with rollout.quantization: {quantization}, whose parameters are not "
            "those of training; set it to load or auto"
        )
    return weights


def register_loader(name: str, load: Callable[[nn.Module], None]) -> None:
    """Makes `name` a load format of vLLM that calls `load` with a new model."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class Loader(BaseModelLoader):
        """Called by vLLM between building a model and laying its weights out for kernels."""

        def download_model(self, model_config: Any) -> None:
            """There is nothing to fetch."""

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            load(model)

    register_model_loader(name)(Loader)
