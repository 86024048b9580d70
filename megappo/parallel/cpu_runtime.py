"""Megatron-core on a host without a GPU: gloo, CPU tensors, no streams.

What a GPU without Transformer Engine needs as well is in `without_te.py`.
Megatron calls `torch.cuda` by name. Each function here replaces one group of those names and says what breaks without
it. All were seen necessary with megatron-core 0.16.1 and 0.19.2 on torch 2.13.
"""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device
from torch import Tensor

from megappo.parallel.patching import replace

_FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "zeros_like", "ones_like",
    "empty_like", "full_like", "as_tensor", "linspace", "eye",
)  # fmt: skip


def install() -> None:
    """Installs all replacements; must run before megatron is first imported."""
    _replace_device_queries()
    _replace_streams()
    _replace_profiler_ranges()
    _replace_cuda_random_state()
    _replace_tensor_factories()
    _replace_tensor_moves()
    _replace_tensor_type_names()
    _replace_uneven_collectives()
    # From here on megatron is imported, with the names above in place.
    _import_megatron_without_compiler()
    _replace_megatron_random_state()
    _replace_split_sizes()


class _NoStream:
    """Plays a CUDA stream and a CUDA event: everything on a CPU has already happened."""

    device = "cpu"
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __enter__(self) -> "_NoStream":
        return self

    def __exit__(self, *_: Any) -> None:
        return None

    def query(self) -> bool:
        return True

    def record_event(self, *_: Any) -> "_NoStream":
        return self

    def elapsed_time(self, *_: Any) -> float:
        return 0.0

    def __getattr__(self, name: str) -> Callable[..., None]:
        return _nothing()


def _nothing() -> Callable[..., None]:
    """A function of its own that does nothing: torch._dynamo refuses one object under two of torch's names (2.13)."""
    return lambda *_, **__: None


def _cpu_for_cuda(device: Any) -> Any:
    """ "cuda…" becomes "cpu"; other devices, and an index, stay as they are."""
    return "cpu" if device is not None and not isinstance(device, int) and str(device).startswith("cuda") else device


def _replace_device_queries() -> None:
    """Buffers are made on `current_device()`, which raises without a driver."""
    replace(torch.cuda, "current_device", lambda: torch.device("cpu"))
    replace(torch.cuda, "device_count", lambda: 1)
    for name in ("set_device", "synchronize", "empty_cache"):
        replace(torch.cuda, name, _nothing())


def _replace_streams() -> None:
    """Overlapped gradient reduction and the pipeline's transfers wait on streams and events."""
    replace(torch.cuda, "Stream", _NoStream)
    replace(torch.cuda, "Event", _NoStream)
    for name in ("current_stream", "default_stream"):
        replace(torch.cuda, name, lambda *_, **__: _NoStream())
    replace(torch.cuda, "stream", lambda _: contextlib.nullcontext())


def _replace_profiler_ranges() -> None:
    """Ranges for NVIDIA's profiler are pushed in every layer."""
    replace(torch.cuda.nvtx, "range_push", _nothing())
    replace(torch.cuda.nvtx, "range_pop", _nothing())


def _cpu_random_state(*_: Any, **__: Any) -> Tensor:
    return torch.get_rng_state()


def _set_cpu_random_state(state: Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _replace_cuda_random_state() -> None:
    """Megatron's RNG tracker switches between states of the CUDA generator; here of the only one there is."""
    replace(torch.cuda, "get_rng_state", _cpu_random_state)
    replace(torch.cuda, "set_rng_state", _set_cpu_random_state)
    replace(torch.cuda, "manual_seed", lambda seed: torch.default_generator.manual_seed(int(seed)) and None)
    replace(torch.cuda, "manual_seed_all", lambda seed: torch.default_generator.manual_seed(int(seed)) and None)


def _on_cpu(factory: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        if "device" in kwargs:
            kwargs["device"] = _cpu_for_cuda(kwargs["device"])
        kwargs.pop("pin_memory", None)  # the allocator of pinned memory needs a driver
        return factory(*args, **kwargs)

    return make


def _replace_tensor_factories() -> None:
    """Megatron writes `device="cuda"` and `pin_memory=True` into calls of torch's factories."""
    # `with torch.device(…)`, in which Hugging Face loads models, knows the factories from a list made on its first use.
    # Made after the replacement it lacks the functions that really run: RoPE buffers came out as garbage (torch 2.13).
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        replace(torch, name, _on_cpu(getattr(torch, name)))


def _replace_tensor_moves() -> None:
    """`.cuda()` and `.to("cuda")` stay where they are."""
    original = torch.Tensor.to

    def to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        args = tuple(_cpu_for_cuda(value) if isinstance(value, str | torch.device) else value for value in args)
        if "device" in kwargs:
            kwargs["device"] = _cpu_for_cuda(kwargs["device"])
        return original(self, *args, **kwargs)

    replace(torch.Tensor, "to", to)
    replace(torch.Tensor, "cuda", lambda self, *_, **__: self)
    replace(torch.nn.Module, "cuda", lambda self, *_, **__: self)


def _replace_tensor_type_names() -> None:
    """Megatron's optimizers accept parameters whose `type()` is "torch.cuda.FloatTensor" and the like, no others."""
    original = torch.Tensor.type

    def type_name(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return original(self, *args, **kwargs)
        return str(original(self)).replace("torch.", "torch.cuda.", 1)

    replace(torch.Tensor, "type", type_name)


def _replace_uneven_collectives() -> None:
    """gloo's all_gather and reduce_scatter want equal sizes; Megatron's experts with expert TP send unequal ones."""
    even_all_gather, even_reduce_scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(outputs: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
        if async_op or all(output.shape == outputs[0].shape for output in outputs):
            return even_all_gather(outputs, tensor, group=group, async_op=async_op)
        outputs[dist.get_rank(group)].copy_(tensor)
        for source, output in enumerate(outputs):
            dist.broadcast(output, group_src=source, group=group)
        return None

    def reduce_scatter(
        output: Tensor, inputs: list[Tensor], op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if async_op or all(tensor.shape == inputs[0].shape for tensor in inputs):
            return even_reduce_scatter(output, inputs, op=op, group=group, async_op=async_op)
        for destination, tensor in enumerate(inputs):
            total = tensor.clone()
            dist.all_reduce(total, op=op, group=group)
            if destination == dist.get_rank(group):
                output.copy_(total)
        return None

    replace(dist, "all_gather", all_gather)
    replace(dist, "reduce_scatter", reduce_scatter)


def _import_megatron_without_compiler() -> None:
    """Megatron's jit_fuser is torch.compile, which would compile C++ kernels for minutes on a CPU.

    Dynamo switched off is not enough: to decorate a function loads the compiler, a third of what a rank takes to start.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

    def leave_as_it_is(function: Any = None, **_: Any) -> Any:
        return function if function is not None else lambda other: other

    original = replace(torch, "compile", leave_as_it_is)
    try:
        from megatron.core import jit
    finally:
        replace(torch, "compile", original)
    jit.disable_jit_fuser()


def _replace_megatron_random_state() -> None:
    """Megatron reads the CUDA generator's state past `torch.cuda.get_rng_state`, from the device's generator object."""
    from megatron.core.tensor_parallel import random

    replace(random, "_get_cuda_rng_state", _cpu_random_state)
    replace(random, "_set_cuda_rng_state", _set_cpu_random_state)


def _replace_split_sizes() -> None:
    """The all-to-all's split sizes become numpy arrays only for tensors that live on a GPU."""
    from megatron.core.transformer.moe import token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    replace(token_dispatcher, "maybe_move_tensor_to_cpu", to_cpu)
