"""What vLLM needs of a process, and what it must not change there. Imports vllm only when asked to."""

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

import importlib.util
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch

from megappo.config.shared_gpus import ranks_per_gpu
from megappo.errors import ConfigError

_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the rank's own process
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
_VARIABLES_ON_CPU = {
    "TORCH_COMPILE_DISABLE": "1",  # 0.32.0 would compile for 22 s at the first generation
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks share the cores; torchrun says how many threads each has
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_MLA_DISABLE": "1",  # 0.32.0's kernels for latents have one size of them, and pack weights
}
_VARIABLES_ON_SHARED_GPUS = {
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # torch's symmetric memory wants a GPU for each rank
}
_STREAMS = ("Stream", "Event", "current_stream", "stream")
"""Of torch.cuda, replaced on a CPU: by megappo, and by vLLM when its worker is imported."""


def prepare_environment() -> None:
    """Sets vLLM's variables where they are not set; before vllm is first imported. ConfigError where it is missing."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "rollout.engine: 'vllm' is not installed here; make setup-gpu on a GPU machine, make setup-vllm on a "
            "CPU, or set it to native"
        )
    variables = _VARIABLES | (_VARIABLES_ON_CPU if runtime.on_cpu else {})
    if ranks_per_gpu() > 1:
        variables = variables | _VARIABLES_ON_SHARED_GPUS
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def has_latent_kernels() -> bool:
    """Whether vLLM runs latent attention in kernels of its own; after `prepare_environment`."""
    return os.environ.get("VLLM_MLA_DISABLE", "0") in ("", "0")


@contextmanager
def process_state_kept() -> Iterator[None]:
    """While inside, vLLM may seed and draw as it likes; afterwards, also after an error, random numbers go on as if it
    had not been there. Its CPU worker also takes `torch.set_num_threads` away, and replaces streams and events by some
    that record nothing, which a model with experts that is built later can't wait for (0.32.0): all of these come
    back."""
    python, numpys, torchs = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    cuda = None if runtime.on_cpu else torch.cuda.get_rng_state()
    set_num_threads = torch.set_num_threads
    streams = {name: getattr(torch.cuda, name) for name in _STREAMS} if runtime.on_cpu else {}
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(numpys)
        torch.set_rng_state(torchs)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
        torch.set_num_threads = set_num_threads
        for name, own in streams.items():
            setattr(torch.cuda, name, own)
