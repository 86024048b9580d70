"""Training and memory of a model whose parameters are cut over the data-parallel ranks (`models/sharded.py`)."""

from __future__ import annotations

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from torch import Tensor, nn

from megappo.engines.offload import Kind, RoleMemory, Tensors
from megappo.models.sharded import Shards


class ShardedModel(nn.Module):
    """Stands around a cut model as Megatron's DDP does around a whole one, for schedules and optimizer.

    Its parameters are this rank's parts, plain tensors with a `main_grad` each: Megatron's optimizer, its groups, its
    norm and its reductions over TP ranks see a model of which this rank has a shard. What other ranks hold all of is
    not among them: fused kernels over lists of tensors take no empty ones.
    """

    def __init__(self, shards: Shards) -> None:
        super().__init__()
        self.module = shards.model
        self.config = shards.model.config
        self.ddp_config = DistributedDataParallelConfig()
        self._shards = shards

    def forward(self, *arguments: Any, **settings: Any) -> Any:
        output = self.module(*arguments, **settings)
        if not torch.is_grad_enabled():
            self._shards.rest()
        return output

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from ((name, part.local) for name, part in self._shards.parts.items() if not part.is_empty)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around all micro-batches but the last of an update."""
        self._shards.reduces(self._shards.reduces_each)
        try:
            yield
        finally:
            self._shards.reduces(True)

    def zero_grad_buffer(self) -> None:
        for part in self._shards.parts.values():
            part.distributed.grad = None
            part.local.main_grad = None  # type: ignore[attr-defined]

    def finish_grad_sync(self, *_: Any, **__: Any) -> None:
        """After the last backward pass: the summed gradients of this rank's parts become Megatron's."""
        for part in self._shards.parts.values():
            gradient: Any = part.distributed.grad
            local = torch.zeros_like(part.local) if gradient is None else gradient.to_local()
            part.local.main_grad = local  # type: ignore[attr-defined]

    def gradients(self) -> Iterable[Tensor]:
        """Those that exist at the moment."""
        held = (getattr(part.local, "main_grad", None) for part in self._shards.parts.values())
        return [gradient for gradient in held if gradient is not None]


class ShardedMemory(RoleMemory):
    """The memory of a cut model, which is whole as long as its parameters are held: while its weights generate."""

    def __init__(self, shards: Shards, tensors: dict[Kind, Tensors]) -> None:
        super().__init__({"params": shards.parameters.values, **tensors}, (), shards.mesh.device)
        self._shards = shards

    def hold(self, kind: Kind) -> None:
        if kind == "params":
            self._shards.gather()

    def let_go(self, kind: Kind) -> None:
        if kind == "params":
            self._shards.release()

    @property
    def gathered_bytes(self) -> int:
        return self._shards.gathered_bytes
