"""vLLM's memory on a GPU between its turns: room for it, refusals, and the peaks that a run tells.

A GPU of 100 GiB. Training has 50 GiB of it, and torch keeps blocks that training has freed.
"""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megappo.engines.rollout import HeldBytes, Replicas, SamplingParams
from megappo.engines.vllm import memory as engine_memory
from megappo.engines.vllm.memory import EngineMemory, require_share
from megappo.errors import ConfigError
from megappo.observe.memory import AbsentBytes, PeakMemory
from megappo.trainer.loop import Loop, Step
from megappo.workers.rollout import RolloutWorker

GIB = 1 << 30
TOTAL, FIXED, WEIGHTS = 100 * GIB, 1 * GIB, 2 * GIB
CACHE = 38 * GIB
OFFLOAD = "let training keep less in vLLM's turn (actor.offload, critic.offload and ref.offload, docs/memory.md)"


@dataclass
class Device:
    """`cached` is what torch keeps; an engine that sleeps leaves `FIXED` bytes."""

    training: int = 50 * GIB
    cached: int = 0
    engine: int = 0
    times_emptied: int = 0

    @property
    def free(self) -> int:
        return TOTAL - self.training - self.cached - self.engine

    def empty_cache(self) -> None:
        self.cached = 0
        self.times_emptied += 1


class FakeLLM:
    """Takes and frees memory as vLLM does, awake from the start, and never more than there is."""

    def __init__(self, device: Device) -> None:
        self.device = device
        device.engine += FIXED + WEIGHTS + CACHE

    def sleep(self, level: int) -> None:
        self.device.engine -= WEIGHTS + CACHE

    def wake_up(self, tags: list[str]) -> None:
        size = {"weights": WEIGHTS, "kv_cache": CACHE}[tags[0]]
        assert size <= self.device.free, "vLLM would end here"
        self.device.engine += size


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    device = Device()
    monkeypatch.setattr("megappo.parallel.runtime.on_cpu", False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (device.free, TOTAL))
    monkeypatch.setattr(torch.cuda, "empty_cache", device.empty_cache)
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats",
        lambda: {"reserved_bytes.all.current": device.cached, "allocated_bytes.all.current": 0},
    )
    yield device
    gc.unfreeze()


def alone() -> Any:
    """The mesh of a world of one rank, as far as it is asked."""
    group, grid = SimpleNamespace(size=lambda: 1), torch.zeros(1, 1, 1, dtype=torch.long)
    return SimpleNamespace(world_group=group, device=torch.device("cpu"), grid=grid, dp=1, rank=0)


def memory_of(device: Device, sleeps: bool = True) -> EngineMemory:
    return EngineMemory(
        FakeLLM(device), alone(), share=0.45, sleeps=sleeps, level=2, used_before_start=device.training
    )  # fmt: skip


def wake(memory: EngineMemory) -> HeldBytes:
    memory.wake_weights()
    memory.wake_cache()
    return memory.held


def with_another_rank(monkeypatch: pytest.MonkeyPatch, *values: float) -> None:
    """A second rank, whose numbers are `values`."""

    def max_over(group: Any, device: torch.device) -> Callable[[Tensor], Tensor]:
        return lambda own: torch.maximum(own, torch.tensor(values, dtype=torch.float64))

    monkeypatch.setattr(engine_memory, "max_over", max_over)


def test_what_torch_keeps_goes_back_where_it_is_in_the_way(device: Device) -> None:
    memory, emptied = memory_of(device), []
    # 49 GiB are free beside training and the sleeping engine, which takes 40: 9 GiB fit beside both, 10 do not.
    for cached in (5, 9, 10, 0):
        device.cached = cached * GIB
        assert wake(memory) == HeldBytes(FIXED, FIXED + WEIGHTS, FIXED + WEIGHTS + CACHE)
        emptied.append(device.times_emptied)
        memory.sleep()
    assert emptied == [0, 0, 1, 1]


def test_too_little_memory_says_which_share_would_do(device: Device) -> None:
    memory = memory_of(device)
    device.training, device.cached = 65 * GIB, 20 * GIB
    memory.wake_weights()
    with pytest.raises(ConfigError) as told:
        memory.wake_cache()
    # 32 GiB are left for 38. With the 3 GiB that it holds, vLLM has 35 of 100 GiB, of which one stays free.
    assert str(told.value) == (
        "rollout.gpu_memory_utilization: 0.45, but vLLM's cache of 38.0 GiB does not fit beside what training keeps: "
        f"6.0 GiB are missing; set it to 0.34, or {OFFLOAD}"
    )


def test_what_training_gives_up_after_the_weights_counts(device: Device) -> None:
    memory = memory_of(device)
    device.training = 65 * GIB
    memory.wake_weights()
    with memory.of_others():
        device.training -= 6 * GIB
    memory.wake_cache()
    assert memory.held == HeldBytes(FIXED, FIXED + WEIGHTS, FIXED + WEIGHTS + CACHE)


def test_no_share_is_proposed_where_none_would_do(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(device)
    device.training = 90 * GIB
    memory.wake_weights()
    with_another_rank(monkeypatch, 0.0, 0.0, 0.005)
    with pytest.raises(ConfigError, match=r"31\.0 GiB are missing; let training keep less"):
        memory.wake_cache()


def test_all_ranks_refuse_together_by_the_one_that_has_least(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = memory_of(device)
    memory.wake_weights()
    with_another_rank(monkeypatch, 3.0 * GIB, 38.0 * GIB, -0.21)
    with pytest.raises(ConfigError, match=r"3\.0 GiB are missing; set it to 0\.21, or"):
        memory.wake_cache()
    assert device.engine == FIXED + WEIGHTS


def test_an_engine_that_keeps_its_memory_needs_no_room(device: Device) -> None:
    memory = memory_of(device, sleeps=False)
    device.training, device.cached = 55 * GIB, 4 * GIB
    wake(memory)
    memory.sleep()
    assert device.times_emptied == 0 and memory.absent == AbsentBytes(0, 0)


def test_a_start_wants_the_whole_share(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    require_share(0.5, alone())
    with pytest.raises(ConfigError) as told:
        require_share(0.6, alone())
    assert str(told.value) == (
        "rollout.gpu_memory_utilization: 0.6 of a GPU are 60.0 GiB, of which 10.0 GiB are missing beside training's "
        f"models; set it to 0.49, or {OFFLOAD}"
    )
    with_another_rank(monkeypatch, 2.0 * GIB, -0.47)
    with pytest.raises(ConfigError, match=r"of which 2\.0 GiB are missing beside training's models; set it to 0\.47"):
        require_share(0.5, alone())
    monkeypatch.setattr("megappo.parallel.runtime.on_cpu", True)
    require_share(0.6, alone())


class Engine:
    """As much of an engine as turns of memory need."""

    replicas = Replicas(((0,),))

    def __init__(self, memory: EngineMemory) -> None:
        self.memory = memory
        self.absent = memory.absent

    def sync_weights(self) -> None:
        wake(self.memory)

    def release(self) -> None:
        self.memory.sleep()


def test_peaks_are_without_what_a_sleeping_engine_gave_back(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts the engine's 40 GiB all the time. They are on the device from when it wakes until it sleeps."""
    most = [91]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: most[0] * GIB)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    engine: Any = Engine(memory_of(device))
    sampling = SamplingParams(temperature=1.0, max_tokens=4)
    worker = RolloutWorker(engine, sampling, alone(), num_samples=1, seed=0)
    loop: Any = object.__new__(Loop)
    loop._peak, loop._reporter = PeakMemory(worker.absent), SimpleNamespace(phase=lambda *rest: None, progress=None)
    evaluator = SimpleNamespace(sets={"held out": []}, run=lambda progress: evaluate(96))
    memory = SimpleNamespace(rest=lambda: None, metrics=lambda phase: {})
    loop._parts = SimpleNamespace(evaluator=evaluator, memory=memory)
    loop._peak.begin_phase()
    found: list[tuple[str, float, float]] = []

    def evaluate(allocated: int) -> dict[str, float]:
        most[0] = allocated
        worker.sync_weights()
        worker.release()
        return {}

    def phase(step: Step, name: str, allocated: int, *calls: Callable[[], object]) -> None:
        with step.phase(name):
            most[0] = allocated
            for call in calls:
                call()
        found.append((name, step.metrics[f"memory/{name}/peak"] / GIB, loop._peak.of_run / GIB))

    step: Any = Step(1, loop._reporter, 1, loop._peak, memory)  # type: ignore[arg-type]
    phase(step, "weight_sync", 90, worker.sync_weights)
    phase(step, "rollout", 89)
    phase(step, "weight_sync", 70, worker.release)
    phase(step, "update_actor", 120)
    loop._evaluate(1)
    phase(Step(2, loop._reporter, 1, loop._peak, memory), "update_actor", 139)  # type: ignore[arg-type]
    # From the start, in which the engine was awake, 91 GiB. The evaluation's 96 GiB are all there, 40 of those of the
    # updates not.
    assert found == [
        ("weight_sync", 90.0, 91.0), ("rollout", 89.0, 91.0), ("weight_sync", 90.0, 91.0), ("update_actor", 80.0, 91.0),
        ("update_actor", 99.0, 99.0),
    ]  # fmt: skip
