"""Communication of data-parallel ranks beside computation: Megatron's DDP with buckets, and when what is whole.

Gradients of a bucket are reduced while the backward pass computes those of the next. The optimizer leaves stale the
parameters that other ranks stepped, and the next forward pass gathers a bucket while it computes with the one before.
So a parameter is whole only where a forward pass has used it, or `finish_gather` was called.
"""

from __future__ import annotations

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from torch import nn

from megappo.config.optim import OptimConfig
from megappo.models.chunks import StageModel, chunks_of


def wrapped_chunks(model: StageModel, config: OptimConfig) -> list[DistributedDataParallel]:
    """Each chunk of the stage in a DDP of its own. Sets in the model's configuration what schedules call of it."""
    overlaps = config.overlap_grad_reduce
    chunks = [
        DistributedDataParallel(
            model.config,
            # Each its own: a DDP writes its bucket size into it.
            DistributedDataParallelConfig(
                grad_reduce_in_fp32=config.grad_reduce_in_fp32,
                use_distributed_optimizer=config.use_distributed_optimizer,
                overlap_grad_reduce=overlaps,
                overlap_param_gather=config.overlap_param_gather,
                align_param_gather=config.align_param_gather,
                bucket_size=config.bucket_size,
            ),
            chunk,
            # As Megatron's own training does: communication of later chunks has others' computation to hide behind.
            disable_bucketing=overlaps and number > 0,
        )
        for number, chunk in enumerate(chunks_of(model))
    ]
    pp = model.config.pipeline_model_parallel_size
    if overlaps and pp > 1:
        # Stages begin to reduce together: one that began alone would slow down the transfers of the others.
        model.config.grad_sync_func = _one_or_all([chunk.start_grad_sync for chunk in chunks])
    if config.overlap_param_gather:
        for chunk in chunks:
            _wait_for_parameters_without_forward(chunk)
        if config.align_param_gather:
            model.config.param_sync_func = _one_or_all([_start_of(chunk) for chunk in chunks])
    return chunks


def finish_gather(chunks: Sequence[nn.Module]) -> None:
    """Makes every parameter whole. All data-parallel ranks call it together, where they have run the same passes.

    What a forward pass has gathered since the last step is not gathered again. Modules that are no DDP, or gather in
    the optimizer's step, are whole.
    """
    for chunk in chunks:
        if not (isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather):
            continue
        with torch.no_grad():
            for group in _bucket_groups(chunk):
                if group.param_gather_handle is not None or not group.param_gather_dispatched:
                    group.start_param_sync(force_sync=True)  # waits where it was begun


def check_gathered(chunks: Sequence[nn.Module]) -> None:
    """After the backward pass of an update, before Megatron takes note of the next gather: every bucket was whole when
    it was computed with. A parameter that no module with a forward of its own holds would be silently stale."""
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            for group in _bucket_groups(chunk):
                assert group.param_gather_dispatched and group.param_gather_handle is None, (
                    "an update computed with parameters that were not gathered; set overlap_param_gather to false"
                )


def _bucket_groups(chunk: DistributedDataParallel) -> list[Any]:
    groups: list[Any] = chunk.bucket_groups + chunk.expert_parallel_bucket_groups
    return groups


def _one_or_all(functions: list[Callable[..., None]]) -> Any:
    """As Megatron's schedules want it: a list where there are virtual stages."""
    return functions if len(functions) > 1 else functions[0]


def _start_of(chunk: DistributedDataParallel) -> Callable[..., None]:
    """Begins to gather what no forward pass has gathered since the last step. Megatron's own begins all anew."""

    def start(*_: Any) -> None:
        with torch.no_grad():
            for group in _bucket_groups(chunk):
                if not group.param_gather_dispatched:
                    group.start_param_sync()

    return start


def _wait_for_parameters_without_forward(chunk: DistributedDataParallel) -> None:
    """Megatron waits for a module's parameters when the module is called. Those of modules that never are, such as an
    adapter's, which change another module's output, are waited for when the nearest module above them is called."""
    held: dict[nn.Module, list[nn.Parameter]] = {}
    for caller, parameter in _without_forward(chunk.module, chunk.module):
        if parameter in chunk.param_to_bucket_group:
            held.setdefault(caller, []).append(parameter)
    for caller, parameters in held.items():
        caller.register_forward_pre_hook(_wait_for(chunk, parameters))


def _without_forward(module: nn.Module, caller: nn.Module) -> Iterator[tuple[nn.Module, nn.Parameter]]:
    for child in module.children():
        has_forward = type(child).forward is not nn.Module.forward
        if not has_forward:
            yield from ((caller, parameter) for parameter in child.parameters(recurse=False))
        yield from _without_forward(child, child if has_forward else caller)


def _wait_for(chunk: DistributedDataParallel, parameters: list[nn.Parameter]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        for parameter in parameters:
            chunk.param_to_bucket_group[parameter].finish_param_sync(
                skip_next_bucket_dispatch=chunk.ddp_config.align_param_gather
            )

    return hook
