"""The engine's memory in turns with training's: sleep, waking in two parts, and what it holds at each point."""

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

import gc
from typing import Any

import torch

from megappo.engines.rollout import HeldBytes


class EngineMemory:
    """The memory of a vLLM engine on this rank. `sleeps` is whether it gives it back between its turns.

    On a CPU it does not: vLLM's sleep frees nothing there (0.32.0), so that it is not asked to.
    """

    def __init__(self, llm: Any, *, sleeps: bool, level: int, used_before_start: int) -> None:
        self._llm = llm
        self._sleeps = sleeps and not runtime.on_cpu
        self._level = level
        if self._sleeps:
            # vLLM collects garbage in every sleep; what the engine is made of stays, and need not be looked through.
            gc.collect()
            gc.freeze()
            self._llm.sleep(level=level)
        held = cpu_bytes(llm) if runtime.on_cpu else used_bytes() - used_before_start
        self._held = HeldBytes(asleep=held, with_weights=held, awake=held)

    @property
    def held(self) -> HeldBytes:
        """Measured on the device in the last switch: what vLLM frees and takes there is not in torch's numbers."""
        return self._held

    def sleep(self) -> None:
        if self._sleeps:
            self._llm.sleep(level=self._level)

    def wake_weights(self) -> None:
        with_weights = self._held.asleep + self._wake("weights")
        self._held = HeldBytes(self._held.asleep, with_weights, with_weights)

    def wake_cache(self) -> None:
        awake = self._held.with_weights + self._wake("kv_cache")
        self._held = HeldBytes(self._held.asleep, self._held.with_weights, awake)

    def _wake(self, part: str) -> int:
        """Bytes that the part takes."""
        if not self._sleeps:
            return 0
        before = used_bytes()
        self._llm.wake_up(tags=[part])
        return used_bytes() - before


def synchronize() -> None:
    """Waits for this rank's GPU, where there is one, so that a clock shows what it has done."""
    if not runtime.on_cpu:
        torch.cuda.synchronize()


def used_bytes() -> int:
    """Bytes in use on this rank's GPU, by whatever process; 0 on a CPU."""
    if runtime.on_cpu:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def cpu_bytes(llm: Any) -> int:
    """Bytes of parameters and KV cache. What vLLM packed into handles of its kernels is not seen (0.32.0)."""

    def of_worker(worker: Any) -> int:
        tensors = [*worker.get_model().parameters(), *worker.model_runner.kv_caches]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())

    return int(llm.collective_rpc(of_worker)[0])
