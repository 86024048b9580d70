"""The adapter of one linear layer: LoRA (Hu et al. 2021) and DoRA (Liu et al. 2024) on Megatron's TP layers.

It stands beside its layer, whose output it changes by a hook: the layer, its weight and its place in checkpoints stay
as they are. Where adapters are put into a model is `attach_lora.py`.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional

from megappo.config.lora import LoraConfig
from megappo.models.adapter_map import SUFFIX, AdapterTarget, projection_of
from megappo.models.weight_map import Block
from megappo.parallel.mesh import Mesh


class Adapter(nn.Module):
    """What stands beside frozen weights and changes what they give, while it is `enabled`."""

    enabled = True


class LinearAdapter(Adapter):
    """ΔW = alpha / rank · B · A of a column- or row-parallel layer, an A for each of its projections.

    Column-parallel: A [rank, in] is whole on every TP rank, B [rows / tp, rank] is cut; row-parallel: A [rank, in / tp]
    is cut, B [rows, rank] whole. `blocks`: this rank's rows of the layer, block after block. B is zero at first, so
    that the layer computes what it did; A is undefined until `attach_lora` fills it. DoRA scales row i of W + ΔW to the
    length `magnitude[i]`; its gradient takes the length that it divides by for a constant, as the paper does (§4.3).
    Rows of projections without an adapter, which lie in the same blocks, stay the weight's: what B and `magnitude` have
    for them is neither read nor trained.

    What is whole on every TP rank gets the same gradient on each; under sequence parallelism each has a part of it, and
    the mark `sequence_parallel` has Megatron add them up.
    """

    def __init__(
        self, target: AdapterTarget, blocks: Sequence[Block], lora: LoraConfig, mesh: Mesh, weight: Tensor
    ) -> None:
        super().__init__()
        self._is_row_parallel = target.is_row_parallel
        self._sequence_parallel = mesh.sequence_parallel
        self._tp_group: ProcessGroup = mesh.tp_group
        self._rank = lora.rank
        self._scaling = lora.alpha / lora.rank
        self._dropout = lora.dropout
        columns = weight.shape[1]
        # A ParameterDict sorts what it is given (torch 2.13): the order of projections is kept beside it.
        self._names = [name.rpartition(".")[2] for name in target.projections]
        self.lora_A = nn.ParameterDict({name: self._parameter(weight, (lora.rank, columns)) for name in self._names})
        sizes = [sum(segment.length for segment in block) for block in blocks]
        self.lora_B = nn.ParameterDict(
            {str(number): self._parameter(weight, (size, lora.rank)) for number, size in enumerate(sizes)}
        )
        self.magnitude = nn.ParameterDict(
            {str(number): self._parameter(weight, (size,)) for number, size in enumerate(sizes)}
            if lora.type == "dora"
            else {}
        )
        self._rows = [_rows_of(block, target.projections, weight.device) for block in blocks]
        self._has_adapter = torch.cat(
            [_are_adapted(b, target.projections, weight.device) for b in blocks]
        )  # [rows / tp]
        self._mark_shards()
        self.eval()  # inputs are left out in updates alone: `dropping_inputs`

    @staticmethod
    def _parameter(like: Tensor, shape: tuple[int, ...]) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device))

    def _mark_shards(self) -> None:
        cut, whole = (self.lora_A, self.lora_B) if self._is_row_parallel else (self.lora_B, self.lora_A)
        lengths = list(self.magnitude.values())
        for parameter in [*cut.values(), *([] if self._is_row_parallel else lengths)]:
            parameter.tensor_model_parallel = True
            parameter.partition_dim = int(self._is_row_parallel)
            parameter.partition_stride = 1
        for parameter in [*whole.values(), *(lengths if self._is_row_parallel else [])]:
            parameter.sequence_parallel = self._sequence_parallel

    def change_output(self, linear: nn.Module, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor | None]) -> Any:
        """The hook of `linear`: its (output [s, b, rows / tp], bias) with the adapter's part."""
        if not self.enabled:
            return None
        plain, bias = output
        added = self._scaling * self._added(inputs[0])
        if not self.magnitude:
            return plain + added, bias
        own_bias: Any = None if linear.skip_bias_add else linear.bias
        product = plain if own_bias is None else plain - own_bias
        with torch.no_grad():
            weight = self._sum(linear)
        ratio = self._ratio(weight)
        # So written, a ratio of 1 leaves the output as it is to the bit; what is near 1 is subtracted before rounding.
        return plain + ((ratio - 1).to(plain.dtype) * product + ratio.to(plain.dtype) * added), bias

    def merged(self, linear: nn.Module) -> Tensor:
        """This rank's shard of the weight with ΔW in it, a new tensor. All TP ranks call it."""
        with torch.no_grad():
            weight = self._sum(linear)
            if self.magnitude:
                weight *= self._ratio(weight)[:, None]
            return weight.to(linear.weight.dtype)  # type: ignore[arg-type]

    def reset_magnitude(self, linear: nn.Module) -> None:
        """DoRA's lengths become those of the rows of W + ΔW. All TP ranks call it."""
        with torch.no_grad():
            start = 0
            lengths = self._lengths(self._sum(linear)) if self.magnitude else None
            for parameter in self.magnitude.values():
                assert lengths is not None, "there is a magnitude"
                parameter.copy_(lengths[start : start + len(parameter)])
                start += len(parameter)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None, **_: Any
    ) -> dict[str, Any]:
        """For Megatron's checkpoints: which parameters are cut over TP ranks, and along which axis."""
        state = self.state_dict(prefix="", keep_vars=True)
        axes = {
            name: parameter.partition_dim
            for name, parameter in state.items()
            if getattr(parameter, "tensor_model_parallel", False)
        }
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(state, prefix, axes, sharded_offsets)
        return sharded

    def _added(self, hidden: Tensor) -> Tensor:
        """B · A · x [s, b, rows / tp], where the layer's own output has the same tokens."""
        low = self._low(hidden)  # [tokens, b, projections · rank]
        if self._is_row_parallel:
            reduce = (
                reduce_scatter_to_sequence_parallel_region
                if self._sequence_parallel
                else reduce_from_tensor_model_parallel_region
            )
            low = reduce(low, group=self._tp_group)
        elif self._sequence_parallel:
            low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=self._tp_group)
        else:
            low = copy_to_tensor_model_parallel_region(low, group=self._tp_group)
        lows = low.split(self._rank, dim=-1)
        return torch.cat(
            [self._block_rows(lows, b, rows) for b, rows in zip(self.lora_B.values(), self._rows, strict=True)], dim=-1
        )

    def _projections(self) -> list[Tensor]:
        """The A of each projection, in the order of the layer's rows."""
        return [self.lora_A[name] for name in self._names]

    def _low(self, hidden: Tensor) -> Tensor:
        matrices = self._projections()
        if self._dropout and self.training:
            dropped = (functional.dropout(hidden, self._dropout, training=True) for _ in matrices)
            return torch.cat([functional.linear(one, a) for one, a in zip(dropped, matrices, strict=True)], dim=-1)
        return functional.linear(hidden, torch.cat(matrices))

    def _block_rows(self, lows: Sequence[Tensor], b: Tensor, rows: "list[Tensor | None]") -> Tensor:
        """[…, rows of the block]: each row of B with the A of its projection; 0 where that has none."""
        for low, own in zip(lows, rows, strict=True):
            if own is not None and len(own) == len(b):
                return functional.linear(low, b)
        if all(own is None for own in rows):
            # In the graph too: TP ranks sum the gradient of what A gives, and DDP waits for that of each parameter.
            return 0 * functional.linear(lows[0], b)
        result = lows[0].new_zeros((*lows[0].shape[:-1], len(b)))
        for low, own in zip(lows, rows, strict=True):
            if own is not None:
                result = result.index_copy(-1, own, functional.linear(low, b[own]))
        return result

    def _ratio(self, weight: Tensor) -> Tensor:
        """[rows / tp] DoRA's factors of the rows of `weight`, W + ΔW, in its type; gradients go to the magnitude alone.

        The lengths are rounded as the magnitude is, as in PEFT (0.21): a new adapter's factors are 1 in bfloat16 too.
        """
        magnitude = torch.cat(list(self.magnitude.values()))
        # A length of 1 where there is no adapter: a row of zeros would make the gradient not a number.
        lengths = self._lengths(weight).masked_fill(~self._has_adapter, 1).to(magnitude.dtype)
        return torch.where(self._has_adapter, magnitude.to(weight.dtype) / lengths, 1)

    def _sum(self, linear: nn.Module) -> Tensor:
        """This rank's shard of W + ΔW in float32 (float64 for weights of that type)."""
        weight: Tensor = linear.weight  # type: ignore[assignment]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        total, start = weight.to(dtype, copy=True), 0
        for b, rows in zip(self.lora_B.values(), self._rows, strict=True):
            for a, own in zip(self._projections(), rows, strict=True):
                if own is not None:
                    total.index_add_(0, own + start, self._scaling * (b[own].to(dtype) @ a.to(dtype)))
            start += len(b)
        return total

    def _lengths(self, weight: Tensor) -> Tensor:
        """[rows / tp] lengths of the rows of a weight of which this rank has `weight`."""
        squares = weight.square().sum(dim=1)
        if self._is_row_parallel and self._tp_group.size() > 1:
            dist.all_reduce(squares, group=self._tp_group)
        return squares.sqrt()


def _rows_of(block: Block, projections: Sequence[str], device: torch.device) -> "list[Tensor | None]":
    """For each projection the places of its rows in the block, None where it has none."""
    places: dict[str | None, list[Tensor]] = {}
    start = 0
    for segment in block:
        places.setdefault(projection_of(segment), []).append(torch.arange(start, start + segment.length, device=device))
        start += segment.length
    return [torch.cat(places[name]) if name in places else None for name in projections]


def _are_adapted(block: Block, projections: Sequence[str], device: torch.device) -> Tensor:
    """[rows of the block] whether a row's projection has an adapter."""
    answers = [torch.full((segment.length,), projection_of(segment) in projections) for segment in block]
    return torch.cat(answers).to(device)


def adapters(model: nn.Module) -> Iterator[tuple[str, nn.Module, LinearAdapter]]:
    """(name of the linear layer, the layer, its adapter) of each adapter in a model, in Megatron's wrappers or not."""
    for name, module in model.named_modules():
        if isinstance(module, LinearAdapter):
            linear = name.removesuffix(SUFFIX)
            yield linear, model.get_submodule(linear), module


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """While inside, `model` computes what it did before it had adapters."""
    found = [module for module in model.modules() if isinstance(module, Adapter) and module.enabled]
    try:
        for adapter in found:
            adapter.enabled = False
        yield
    finally:
        for adapter in found:
            adapter.enabled = True


@contextmanager
def dropping_inputs(model: nn.Module) -> Iterator[None]:
    """While inside, adapters leave out inputs as `dropout` says."""
    found = [adapter for _, _, adapter in adapters(model)]
    try:
        for adapter in found:
            adapter.train()
        yield
    finally:
        for adapter in found:
            adapter.eval()
