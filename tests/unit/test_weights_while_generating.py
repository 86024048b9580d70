"""Where training's parameters are while an engine with weights of its own generates."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.engines.offload import RoleMemory
from megappo.engines.rollout import Replicas, SamplingParams, SyncReport, WorstTensor
from megappo.workers.rollout import RolloutWorker

WEIGHTS = torch.arange(6.0)


class Engine:
    """Takes a copy of the weights in every switch, or does not say so where it `uses_training`."""

    replicas = Replicas(((0,),))

    def __init__(self, weights: torch.Tensor, *, uses_training: bool) -> None:
        self.weights = weights
        self.copy: torch.Tensor | None = None
        self._uses_training = uses_training
        self.when_copied: Callable[[], None] = lambda: None
        self.lent = False
        self.resident: Callable[[], int] = lambda: 0
        self.resident_after = 0

    def sync_weights(self) -> SyncReport:
        self.copy = self.weights.clone()
        if not self._uses_training:
            self.when_copied()
        return SyncReport(bytes_aliased=0, bytes_copied=self.copy.nbytes, bytes_sent=0, seconds=0.0)

    @contextmanager
    def memory_lent(self) -> Iterator[None]:
        self.lent = True
        yield
        self.lent = False
        self.resident_after = self.resident()

    def worst_tensor(self) -> WorstTensor | None:
        assert self.copy is not None
        difference = float((self.weights - self.copy).abs().max())
        return WorstTensor(difference, "w") if difference else None

    def release(self) -> None:
        self.copy = None


def worker_of(engine: Any, memory: RoleMemory) -> RolloutWorker:
    mesh: Any = SimpleNamespace(grid=torch.zeros(1, 1, 1, dtype=torch.long), dp=1, rank=0)
    sampling = SamplingParams(temperature=1.0, max_tokens=4)
    return RolloutWorker(engine, sampling, mesh, num_samples=1, seed=0, weights=memory)


@pytest.mark.parametrize("uses_training", [True, False])
def test_offloaded_parameters_are_out_where_the_engine_has_copies(uses_training: bool) -> None:
    weights = WEIGHTS.clone()
    memory = RoleMemory({"params": lambda: [weights]}, ["params"], torch.device("cpu"))
    worker = worker_of(Engine(weights, uses_training=uses_training), memory)
    memory.rest()
    for _ in range(2):
        assert memory.device_bytes("params") == 0
        worker.sync_weights()
        memory.rest()  # the end of a phase
        assert memory.device_bytes("params") == (weights.nbytes if uses_training else 0)
        memory.need("params")  # a check of log-probs, which ends without a phase's end
        worker.release()
        memory.rest()
        assert memory.device_bytes("params") == 0


@pytest.mark.parametrize("uses_training", [True, False])
def test_what_a_check_brought_back_is_out_before_the_engine_takes_its_memory(uses_training: bool) -> None:
    """But for parameters that the engine uses where they lie."""
    weights = WEIGHTS.clone()
    memory = RoleMemory({"params": lambda: [weights]}, ["params"], torch.device("cpu"))
    engine = Engine(weights, uses_training=uses_training)
    engine.resident = lambda: memory.device_bytes("params")
    worker = worker_of(engine, memory)
    worker.sync_weights()
    with worker.memory_lent():
        assert engine.lent
        memory.need("params")
        assert torch.equal(weights, WEIGHTS)
    assert not engine.lent
    assert engine.resident_after == (weights.nbytes if uses_training else 0)


def test_an_engine_that_lends_nothing_goes_on() -> None:
    weights = WEIGHTS.clone()
    engine: Any = SimpleNamespace(replicas=Replicas(((0,),)))
    with worker_of(engine, RoleMemory({"params": lambda: [weights]}, [], torch.device("cpu"))).memory_lent():
        pass


def test_a_comparison_brings_them_back() -> None:
    weights = WEIGHTS.clone()
    memory = RoleMemory({"params": lambda: [weights]}, ["params"], torch.device("cpu"))
    engine = Engine(weights, uses_training=False)
    worker = worker_of(engine, memory)
    worker.sync_weights()
    assert memory.device_bytes("params") == 0
    assert worker.worst_tensor() is None
    assert engine.copy is not None
    engine.copy[2] += 0.5
    assert worker.worst_tensor() == WorstTensor(0.5, "w")
    worker.release()
    memory.rest()
    assert memory.device_bytes("params") == 0


def test_parameters_that_stay_stay_as_they_are() -> None:
    weights = WEIGHTS.clone()
    memory = RoleMemory({"params": lambda: [weights]}, [], torch.device("cpu"))
    worker = worker_of(Engine(weights, uses_training=False), memory)
    worker.sync_weights()
    assert torch.equal(weights, WEIGHTS) and memory.device_bytes("params") == weights.nbytes
