"""Has Megatron's reshardable checkpoints hold the optimizer state of every bucket where it belongs.

The distributed optimizer cuts each bucket of DDP's buffer evenly, for which buckets are padded at their ends.
`get_parameter_state_dp_zero` joins the buckets without these ends, and `sharded_param_state_fully_reshardable` reads
the result at the places that parameters have with them: what stands behind a padded bucket is saved shifted, with a
warning at most (megatron-core 0.16.1 and 0.19.2). There is more than one bucket with overlapped reductions, and where
a pipeline has two copies of the embedding. Not here: what is saved (`engines/optimizer.py`).
"""

from typing import Any

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from megappo.parallel.patching import replace

_original = DistributedOptimizer.get_parameter_state_dp_zero


def install() -> None:
    """Has this process save and load so; its other format, `dp_zero`, is not used."""
    if DistributedOptimizer.get_parameter_state_dp_zero is _original:
        replace(DistributedOptimizer, "get_parameter_state_dp_zero", _with_padding)


def _with_padding(self: Any, *arguments: Any, **options: Any) -> Any:
    state = _original(self, *arguments, **options)
    if state is not None:
        for number, buffer in enumerate(self.buffers):
            for tensors in state[number].values():
                tensors |= {key: padded(value, buffer) for key, value in tensors.items() if isinstance(value, Tensor)}
    return state


def padded(joined: Tensor, buffer: Any) -> Tensor:
    """[numel] of a DDP buffer, zero where buckets are padded, from [numel_unpadded], its buckets one after another."""
    whole = joined.new_zeros(buffer.numel)
    start = 0
    for bucket in buffer.buckets:
        end = start + bucket.numel_unpadded
        whole[bucket.offset : bucket.offset + bucket.numel_unpadded] = joined[start:end]
        start = end
    return whole
