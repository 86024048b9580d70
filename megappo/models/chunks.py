"""A rank's part of a model: one GPTModel, or a chunk for each of its virtual pipeline stages."""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from collections.abc import Sequence
from typing import Any, TypeAlias

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import nn


class ModelChunks(nn.Module):
    """The chunks of a rank with virtual stages, in the order of their layers: chunk c of pipeline rank r is the stage
    c · pp + r. They share one configuration, and the routing of experts."""

    def __init__(self, chunks: Sequence[GPTModel], layers_of_stages: Sequence[int]) -> None:
        """`layers_of_stages`: of all pp · vpp stages of the model."""
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        self.layers_of_stages = tuple(layers_of_stages)
        self.expert_routing: Any = getattr(chunks[0], "expert_routing", None)

    @property
    def config(self) -> TransformerConfig:
        return self.chunks[0].config

    def sharded_state_dict(self, metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """Megatron's sharded tensors under the names of `load_state_dict`; in a checkpoint they have the names that any
        other layout gives them."""
        chunks: list[GPTModel] = list(self.chunks)
        return {
            f"chunks.{number}.{name}": tensor
            for number, chunk in enumerate(chunks)
            for name, tensor in chunk.sharded_state_dict(metadata=metadata).items()
        }


StageModel: TypeAlias = GPTModel | ModelChunks
"""What `build_model` makes for a rank."""


def unwrapped(model: nn.Module) -> StageModel:
    """The model inside Megatron's wrappers, each of which holds the next as `module`."""
    while not isinstance(model, GPTModel | ModelChunks):
        inner = getattr(model, "module", None)
        assert isinstance(inner, nn.Module), f"a {type(model).__name__} holds no GPTModel"
        model = inner
    return model


def chunks_of(model: nn.Module) -> list[GPTModel]:
    """The GPTModels of a rank in the order of their layers, without Megatron's wrappers; the last may have the head."""
    bare = unwrapped(model)
    return list(bare.chunks) if isinstance(bare, ModelChunks) else [bare]
