"""The engine's memory in turns with training's: room for it, sleep, waking in two parts, what it holds."""

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

import contextlib
import gc
import math
from collections.abc import Iterator
from typing import Any

import torch

from megappo.engines.rollout import HeldBytes
from megappo.errors import ConfigError
from megappo.observe.memory import AbsentBytes
from megappo.parallel.collectives import max_over
from megappo.parallel.mesh import Mesh

SHARE = "rollout.gpu_memory_utilization"
MARGIN = 0.01
"""Of a GPU's memory, left free by the share that is proposed: contexts and fragments differ from turn to turn."""


class EngineMemory:
    """The memory of a vLLM engine on this rank. `sleeps` is whether it gives it back between its turns, `share` its
    `rollout.gpu_memory_utilization`.

    On a CPU it does not: vLLM's sleep frees nothing there (0.32.0), so that it is not asked to.

    vLLM frees and takes memory behind torch, and training's own changes between the engine's turns. So what the engine
    holds when a turn begins is what it held at the end of the last one, and what the device has more or less of by
    the end of a turn is the engine's. What a sleep does not give back stays in all later numbers.
    """

    def __init__(self, llm: Any, mesh: Mesh, *, share: float, sleeps: bool, level: int, used_before_start: int) -> None:
        self._llm = llm
        self._mesh = mesh
        self._share = share
        self.absent = AbsentBytes()
        self._sleeps = sleeps and not runtime.on_cpu
        self._level = level
        if self._sleeps:
            # vLLM collects garbage in every sleep; what the engine is made of stays, and need not be looked through.
            gc.collect()
            gc.freeze()
            before = occupied_bytes()
            self._llm.sleep(level=level)
            self.absent.become(max(0, before - occupied_bytes()))
        self._now = cpu_bytes(llm) if runtime.on_cpu else used_bytes() - used_before_start
        self._others = 0
        self._held = HeldBytes(asleep=self._now, with_weights=self._now, awake=self._now)

    @property
    def held(self) -> HeldBytes:
        """Measured in the last switch."""
        return self._held

    def sleep(self) -> None:
        if not self._sleeps:
            self._now = self._measured()
            return
        self._sleep(self._level)

    def _sleep(self, level: int) -> None:
        before = self._measured()
        self._llm.sleep(level=level)
        self._now = self._measured()
        self.absent.become(max(0, before - self._now))

    def lend(self) -> bool:
        """Within a turn, gives training what the cache takes of the device; whether there is anything to lend.

        A sleep of level 1: weights of the engine's own wait in host memory and come back to where they were, which
        captured graphs read; those that are training's memory are not its to move.
        """
        if self._sleeps:
            self._sleep(1)
        return self._sleeps

    def take_back(self) -> None:
        """The end of `lend`: the cache is there again, with anything in it. A collective call over the world. Raises
        ConfigError on all ranks where training has kept so much that a rank has no room for it."""
        self.wake_weights()
        self.wake_cache()

    def wake_weights(self) -> None:
        self._begin_turn()
        asleep = self._now
        if self._sleeps:
            self._make_room()
        self._wake("weights")
        self._now = self._measured()
        self.absent.become(max(0, self.absent.now - (self._now - asleep)))
        self._held = HeldBytes(asleep, self._now, self._now)

    def wake_cache(self) -> None:
        """A collective call over the world. Raises ConfigError on all ranks, with the share that would do, where a rank
        has no room for it."""
        if self._sleeps:
            self._make_room()
            self._require_room()
        self._wake("kv_cache")
        self._now = self._measured()
        self.absent.become(0)
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

    def _make_room(self) -> None:
        """Gives blocks that torch keeps of training's back to the device, where the engine would not fit beside them:
        that takes time, and training has to get them again."""
        if free_bytes() < self.absent.now:
            torch.cuda.empty_cache()

    def _require_room(self) -> None:
        free = free_bytes()
        # vLLM's share is of all that it holds: what it has already, the cache, and what a forward pass takes.
        own = (self.absent.now - free, self.absent.now, -fitting_share(free + self._now))
        missing, needed, worst = worst_of_ranks(own, self._mesh)
        if missing > 0:
            raise ConfigError(
                f"{SHARE}: {self._share:g}, but vLLM's cache of {gib(needed)} does not fit beside what training keeps: "
                f"{gib(missing)} are missing; {way_out(-worst)}"
            )

    def _begin_turn(self) -> None:
        """Everything on the device that is not the engine's at this moment is others', until the turn ends."""
        if not runtime.on_cpu:
            if self._sleeps:
                gc.collect()  # training's garbage, or the coming sleep would collect it, and pass for the engine's
            self._others = occupied_bytes() - self._now

    def _measured(self) -> int:
        return cpu_bytes(self._llm) if runtime.on_cpu else occupied_bytes() - self._others


def require_share(share: float, mesh: Mesh) -> None:
    """Before vLLM starts, which wants its whole `share` of the GPU to be free, of 0 to 1. A collective call over the
    world. Raises ConfigError on all ranks, with a share that is, where one of them has less."""
    if runtime.on_cpu:
        return
    free = free_bytes()
    total = torch.cuda.mem_get_info()[1]
    missing, worst = worst_of_ranks((share * total - free, -fitting_share(free)), mesh)
    if missing > 0:
        raise ConfigError(
            f"{SHARE}: {share:g} of a GPU are {gib(share * total)}, of which {gib(missing)} are missing beside "
            f"training's models; {way_out(-worst)}"
        )


def fitting_share(nbytes: float) -> float:
    """The largest share of this rank's GPU, in hundredths, that is in `nbytes` with a margin."""
    total = torch.cuda.mem_get_info()[1]
    return math.floor(100 * (nbytes / total - MARGIN) + 1e-9) / 100


def way_out(share: float) -> str:
    less = "let training keep less in vLLM's turn (actor.offload, critic.offload and ref.offload, docs/memory.md)"
    return f"set it to {share:g}, or {less}" if share > 0 else less


def worst_of_ranks(values: tuple[float, ...], mesh: Mesh) -> list[float]:
    """The largest of each over the world."""
    return list(max_over(mesh.world_group, mesh.device)(torch.tensor(values, dtype=torch.float64)).tolist())


def gib(nbytes: float) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def synchronize() -> None:
    """Waits for this rank's GPU, where there is one, so that a clock shows what it has done."""
    if not runtime.on_cpu:
        torch.cuda.synchronize()


def free_bytes() -> int:
    """Of this rank's GPU, for whoever takes them."""
    return int(torch.cuda.mem_get_info()[0])


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
