"""A GPU's memory between training and an engine that takes its own behind torch: room, refusals, peaks.

A GPU of 100 GiB. Training has 50 GiB of it, and torch keeps blocks that training has freed.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.engines.rollout import HeldBytes, Replicas, SamplingParams, SyncReport
from megappo.errors import ConfigError
from megappo.observe.memory import AbsentBytes, PeakMemory
from megappo.trainer.generation import device_share
from megappo.workers.rollout import RolloutWorker

GIB = 1 << 30
TOTAL, FIXED = 100 * GIB, 1 * GIB
NO_MEMORY = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:139"


@dataclass
class Device:
    """`cached` is what torch keeps; an engine that sleeps leaves `FIXED` bytes."""

    training: int = 50 * GIB
    cached: int = 0
    engine: int = FIXED
    times_emptied: int = 0

    @property
    def free(self) -> int:
        return TOTAL - self.training - self.cached - self.engine

    def empty_cache(self) -> None:
        self.cached = 0
        self.times_emptied += 1


class Engine:
    """Takes `size` bytes of the device in each of its turns, or fails as vLLM does."""

    replicas = Replicas(((0,),))

    def __init__(self, device: Device, size: int) -> None:
        self.device = device
        self.size = size
        self.failure: Exception | None = None

    def sync_weights(self) -> SyncReport:
        if self.failure is not None:
            raise self.failure
        if self.device.free < self.size:
            raise RuntimeError(NO_MEMORY)
        self.device.engine += self.size
        held = HeldBytes(FIXED, FIXED, FIXED + self.size)
        return SyncReport(bytes_aliased=0, bytes_copied=0, bytes_sent=0, seconds=0.0, held=held)

    def release(self) -> None:
        self.device.engine -= self.size


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (device.free, TOTAL))
    monkeypatch.setattr(torch.cuda, "empty_cache", device.empty_cache)
    return device


def worker_of(engine: Engine, share: float | None) -> RolloutWorker:
    mesh: Any = SimpleNamespace(grid=torch.zeros(1, 1, 1, dtype=torch.long), dp=1, rank=0)
    sampling = SamplingParams(temperature=1.0, max_tokens=4)
    return RolloutWorker(engine, sampling, mesh, num_samples=1, seed=0, device_share=share)  # type: ignore[arg-type]


def test_what_torch_keeps_goes_back_where_it_is_in_the_way(device: Device) -> None:
    worker = worker_of(Engine(device, 40 * GIB), 0.4)
    emptied = []
    # In the first turn what the engine needs is not known yet. 9 GiB fit beside both, 10 GiB do not.
    for cached in (5, 9, 10, 0):
        device.cached = cached * GIB
        worker.sync_weights()
        emptied.append(device.times_emptied)
        worker.release()
    assert emptied == [1, 1, 2, 2]


def test_too_little_memory_says_what_would_do(device: Device) -> None:
    worker = worker_of(Engine(device, 40 * GIB), 0.4)
    worker.sync_weights()
    worker.release()
    device.training, device.cached = 65 * GIB, 20 * GIB
    with pytest.raises(ConfigError) as told:
        worker.sync_weights()
    # 6 of 100 GiB are missing, and a hundredth stays free: 0.4 - 0.06 - 0.01.
    assert str(told.value) == (
        "rollout.gpu_memory_utilization: 0.4, but the GPU has no room for vLLM to generate: it needs 40.0 GiB, and "
        "training leaves 34.0 GiB of 100.0 GiB; set it to 0.33, or let training keep less between its turns "
        "(actor.offload and critic.offload, docs/memory.md)"
    )
    assert str(told.value.__cause__) == NO_MEMORY


def test_no_share_is_proposed_where_none_would_do(device: Device) -> None:
    worker = worker_of(Engine(device, 40 * GIB), 0.4)
    worker.sync_weights()
    worker.release()
    device.training = 99 * GIB
    with pytest.raises(ConfigError, match=r"training leaves 0\.0 GiB of 100\.0 GiB; let training keep less"):
        worker.sync_weights()


def test_too_little_memory_in_the_first_turn(device: Device) -> None:
    worker = worker_of(Engine(device, 60 * GIB), 0.6)
    with pytest.raises(ConfigError, match=r"vLLM to generate: 49\.0 GiB of 100\.0 GiB are free; set it lower, or let"):
        worker.sync_weights()


def test_other_errors_stay_what_they_are(device: Device) -> None:
    engine = Engine(device, GIB)
    engine.failure = RuntimeError("CUDA error: device-side assert triggered")
    with pytest.raises(RuntimeError, match="device-side assert"):
        worker_of(engine, 0.4).sync_weights()


def test_an_engine_within_torch_is_left_alone(device: Device) -> None:
    worker = worker_of(Engine(device, 40 * GIB), None)
    device.cached = 5 * GIB
    worker.sync_weights()
    worker.release()
    assert device.times_emptied == 0 and device.cached == 5 * GIB
    assert worker.absent == AbsentBytes(0, 0)
    device.training = 90 * GIB
    with pytest.raises(RuntimeError, match="out of memory"):
        worker.sync_weights()


@pytest.mark.parametrize(
    ("engine", "kind", "share"), [("vllm", "cuda", 0.3), ("vllm", "cpu", None), ("native", "cuda", None)]
)
def test_which_engines_take_memory_behind_torch(engine: str, kind: str, share: float | None) -> None:
    config: Any = SimpleNamespace(rollout=SimpleNamespace(engine=engine, gpu_memory_utilization=0.3))
    mesh: Any = SimpleNamespace(device=torch.device(kind))
    assert device_share(config, mesh) == share


def test_peaks_without_what_a_sleeping_engine_gave_back(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts the engine's 40 GiB in every phase. They are on the device from when it wakes until it sleeps."""
    most = [90 * GIB]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: most[0])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    worker = worker_of(Engine(device, 40 * GIB), 0.4)
    peak = PeakMemory(worker.absent)
    found = []

    def phase(allocated: int, *calls: Any) -> None:
        peak.begin_phase()
        most[0] = allocated * GIB
        for call in calls:
            call()
        found.append((peak.metrics("p")["memory/p/peak"] / GIB, peak.of_run / GIB))

    phase(90, worker.sync_weights)
    phase(93, worker.release)
    phase(100)  # an update
    phase(96, worker.sync_weights, worker.release)  # an evaluation: awake in between
    phase(140)
    assert found == [(90.0, 90.0), (93.0, 93.0), (60.0, 93.0), (96.0, 96.0), (100.0, 100.0)]
