"""Makes Megatron runnable on this machine when imported, before anything imports megatron.

Without a GPU it installs `cpu_runtime.py`, without Transformer Engine `without_te.py`; on a GPU with Transformer Engine
it changes nothing. The replacements themselves are in those two files. A megatron-core that can't be imported for lack
of Triton is a UserError here.
"""

import importlib.util
import logging
import warnings
from collections.abc import Callable

import torch

from megappo.parallel import cpu_runtime, without_te
from megappo.parallel.triton_needed import refuse_missing_triton


def has_transformer_engine() -> bool:
    """Whether Transformer Engine's PyTorch part is installed beside a GPU that it can run on."""
    return torch.cuda.is_available() and importlib.util.find_spec("transformer_engine_torch") is not None


WEIGHT_GRADIENT_KERNEL = "fused_weight_gradient_mlp_cuda"
"""Apex's extension that adds a weight's gradient to DDP's float32 buffer in the product that computes it."""


def fuses_weight_gradients() -> bool:
    """Whether Apex's extension is installed. Megatron's own linear layers, the output layer always, know no other."""
    return importlib.util.find_spec(WEIGHT_GRADIENT_KERNEL) is not None


def device() -> torch.device:
    """The device of this rank's parameters."""
    return torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())


def _without(start: str) -> Callable[[logging.LogRecord], bool]:
    """A filter that lets through what does not begin so."""
    return lambda record: not record.getMessage().startswith(start)


on_cpu: bool = not torch.cuda.is_available()
"""Whether this process runs Megatron without a GPU."""

# Said by megatron-core 0.16-0.19 on every rank and import: what is known here (`spec.py` picks the layers), and
# names that torch 2.13 will drop.
for _message in (
    "Transformer Engine and Apex are not installed",
    "Apex is not installed",
    "If you are using transformer_engine as the transformer implementation",
    r"The \.grad attribute of a Tensor that is not a leaf",
    r"`torch\.distributed\.\w+` is deprecated",
    "TypedStorage is deprecated",
    "full scope is deprecated",
    "Please use DTensor instead and we are deprecating ShardedTensor",
    # How it reads a checkpoint's common part (0.19.2).
    r"torch\.distributed is disabled, unavailable or uninitialized",
    "The argument order of load has been changed",
):
    warnings.filterwarnings("ignore", message=_message)

# The same of its logs, by logger (0.19.2): what those who run it can change nothing about.
for _name, _message in {
    "megatron.core.dist_checkpointing.strategies.torch": "MCore's async save is deprecated",
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
}.items():
    logging.getLogger(_name).addFilter(_without(_message))

refuse_missing_triton()
if on_cpu:
    cpu_runtime.install()
if not has_transformer_engine():
    without_te.install()
