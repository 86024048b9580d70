"""How weights get into a vLLM engine: the protocol, and the way through vLLM's own loader.

Binding vLLM's parameters to the training shards is another way, in a file of its own.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from megappo.engines.hybrid.execute import Moved
from megappo.engines.hybrid.stream import hf_tensors
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

    def load(self, vllm_model: nn.Module) -> None:
        """Fills or binds the parameters of a new model, before vLLM lays them out for its kernels and captures
        graphs."""
        ...

    def transfer(self, vllm_model: nn.Module, worker: Any) -> Moved:
        """Makes the training weights of this moment the engine's; the engine is awake but for its cache."""
        ...


class LoadTransfer:
    """Streams whole tensors through vLLM's loader, which cuts, packs and quantises them as it always does.

    `stage` is this rank's training stage, a GPTModel.
    """

    sleep_level: SleepLevel = 2

    def __init__(self, stage: nn.Module, spec: ModelSpec, mesh: Mesh) -> None:
        self._stage = stage
        self._spec = spec
        self._mesh = mesh
        self._weight_bytes = 0

    def load(self, vllm_model: nn.Module) -> None:
        vllm_model.load_weights(hf_tensors(self._stage, self._spec, self._mesh, Moved()))  # type: ignore[operator]
        # Before vLLM packs them: on a CPU it takes the packed ones out of its parameters (0.32.0).
        self._weight_bytes = sum(parameter.nbytes for parameter in vllm_model.parameters())

    def transfer(self, vllm_model: nn.Module, worker: Any) -> Moved:
        for module in vllm_model.modules():
            # Otherwise vLLM takes the experts for laid out already, and computes with wrong ones (0.32.0).
            if hasattr(getattr(module, "quant_method", None), "moe_kernel"):
                module.quant_method.moe_kernel = None  # type: ignore[union-attr]
        moved = Moved()
        tensors = hf_tensors(self._stage, self._spec, self._mesh, moved)
        worker.reload_weights(weights_iterator=tensors, is_checkpoint_format=True)
        left = next(tensors, None)
        assert left is None, f"vLLM's loader stopped before tensor {left and left[0]}: it does not take all of them"
        moved.copied = self._weight_bytes
        return moved


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
