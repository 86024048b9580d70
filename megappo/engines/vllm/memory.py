"""The engine's memory in turns with training's: sleep, waking in two parts, and what it holds at each point."""

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch

from megappo.engines.rollout import HeldBytes


class EngineMemory:
    """The memory of a vLLM engine on this rank. `sleeps` is whether it gives it back between its turns.

    On a CPU it does not: vLLM's sleep frees nothing there (0.32.0), so that it is not asked to.

    vLLM frees and takes memory behind torch, and training's own changes between the engine's turns. So what the engine
    holds when a turn begins is what it held at the end of the last one, and what the device has more or less of by
    the end of a turn is the engine's. What a sleep does not give back stays in all later numbers.
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
        self._now = cpu_bytes(llm) if runtime.on_cpu else used_bytes() - used_before_start
        self._others = 0
        self._held = HeldBytes(asleep=self._now, with_weights=self._now, awake=self._now)

    @property
    def held(self) -> HeldBytes:
        """Measured in the last switch."""
        return self._held

    def sleep(self) -> None:
        if self._sleeps:
            self._llm.sleep(level=self._level)
        self._now = self._measured()

    def wake_weights(self) -> None:
        self._begin_turn()
        asleep = self._now
        self._wake("weights")
        self._now = self._measured()
        self._held = HeldBytes(asleep, self._now, self._now)

    def wake_cache(self) -> None:
        self._wake("kv_cache")
        self._now = self._measured()
        self._held = HeldBytes(self._held.asleep, self._held.with_weights, self._now)

    @contextlib.contextmanager
    def of_others(self) -> Iterator[None]:
        """What the device has more or less of after this block is not the engine's."""
        before = self._measured()
        yield
        if not runtime.on_cpu:
            self._others += self._measured() - before

    def _wake(self, part: str) -> None:
        if self._sleeps:
            self._llm.wake_up(tags=[part])

    def _begin_turn(self) -> None:
        """Everything on the device that is not the engine's at this moment is others', until the turn ends."""
        if not runtime.on_cpu:
            if self._sleeps:
                gc.collect()  # training's garbage, or the coming sleep would collect it, and pass for the engine's
            self._others = occupied_bytes() - self._now

    def _measured(self) -> int:
        return cpu_bytes(self._llm) if runtime.on_cpu else occupied_bytes() - self._others


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


def occupied_bytes() -> int:
    """`used_bytes` without the blocks that torch keeps for later: a sleep gives those back too, also training's."""
    statistics = torch.cuda.memory_stats()
    return used_bytes() - statistics["reserved_bytes.all.current"] + statistics["allocated_bytes.all.current"]


def cpu_bytes(llm: Any) -> int:
    """Bytes of parameters and KV cache. What vLLM packed into handles of its kernels is not seen (0.32.0)."""

    def of_worker(worker: Any) -> int:
        tensors = [*worker.get_model().parameters(), *worker.model_runner.kv_caches]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())

    return int(llm.collective_rpc(of_worker)[0])
