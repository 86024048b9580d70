"""A switch to vLLM and back, on a fake engine: what is called in which order, how long it took, what is held.

docs/hybrid-engine.md, "Turns": the engine's weights come back first, then they are filled, then the cache comes back,
and what it held of older weights is forgotten.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import nn

from megappo.config.grid import TrainingGrid
from megappo.config.rollout import RolloutConfig
from megappo.engines import vllm_rollout
from megappo.engines.hybrid.execute import Moved
from megappo.engines.rollout import HeldBytes, SamplingParams
from megappo.engines.vllm.direct import DirectTransfer
from megappo.engines.vllm.transfer import LoadTransfer
from megappo.engines.vllm_rollout import VLLMRolloutEngine
from megappo.errors import ConfigError

TOTAL = 10**6
SECONDS = {
    "gather": 8.0, "sleep 1": 16.0, "sleep 2": 4.0, "wake weights": 1.0, "transfer": 2.0, "copied": 0.0,
    "wake kv_cache": 0.5, "reset": 0.25,
}  # fmt: skip
SWITCH = ["gather", "wake weights", "transfer", "wake kv_cache", "reset"]
WEIGHTS, CACHE, FIXED = 100, 1000, 10


@dataclass
class Device:
    """A GPU with a training that comes and goes, and an engine; every call takes its time of `SECONDS`."""

    training: int = 5000
    cached: int = 0
    engine: int = FIXED + WEIGHTS + CACHE
    leak: int = 0
    calls: list[str] = field(default_factory=list)
    given: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    def note(self, call: str) -> None:
        self.calls.append(call)
        self.seconds += SECONDS[call]

    @property
    def free(self) -> int:
        return TOTAL - self.training - self.cached - self.engine


class FakeLLM:
    """vLLM's memory in turns: what a sleep leaves, a wake brings back, and `leak` bytes that no sleep gives back."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.llm_engine = SimpleNamespace()

    def sleep(self, level: int) -> None:
        self.device.note(f"sleep {level}")
        self.device.engine -= WEIGHTS + CACHE - self.device.leak
        self.device.cached = 0  # vLLM empties torch's cache with its own

    def wake_up(self, tags: list[str]) -> None:
        (tag,) = tags
        self.device.note(f"wake {tag}")
        self.device.engine += {"weights": WEIGHTS, "kv_cache": CACHE}[tag]

    def collective_rpc(self, call: Callable[[Any], Any]) -> list[Any]:
        return [call(SimpleNamespace(get_model=lambda: None))]

    def reset_prefix_cache(self) -> bool:
        self.device.note("reset")
        return True


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """A GPU for all that the engine asks, as far as it asks."""
    device = Device()
    monkeypatch.setattr("megappo.parallel.runtime.on_cpu", False)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (device.free, TOTAL))
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats",
        lambda: {"reserved_bytes.all.current": 300 + device.cached, "allocated_bytes.all.current": 300},
    )
    monkeypatch.setattr(vllm_rollout, "time", SimpleNamespace(perf_counter=lambda: device.seconds))
    monkeypatch.setattr(vllm_rollout, "finish_parameter_gather", lambda model: device.note("gather"))
    for name, replacement in (("process_state_kept", nullcontext), ("synchronize", lambda: None)):
        monkeypatch.setattr(vllm_rollout, name, replacement)
    for name in ("check_engine", "unwrapped"):
        monkeypatch.setattr(vllm_rollout, name, lambda *rest: None)
    yield device
    gc.unfreeze()


def make(
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    way: Literal["auto", "direct", "load"],
    free_cache: bool = True,
    quantization: Literal["fp8"] | None = None,
    ep: int = 1,
) -> VLLMRolloutEngine:
    """The engine with vLLM and the moving of weights replaced; levels of sleep are those of the true classes."""
    before, device.engine = device.engine, 0

    def start(*arguments: Any, **settings: Any) -> FakeLLM:
        device.engine = before
        return FakeLLM(device)

    def moving(kind: type) -> Any:
        def transfer(self: Any, vllm_model: object, worker: object) -> Moved:
            device.note("transfer")
            return Moved(aliased=1, copied=2, sent=3, peak_bytes=4)

        def init(self: Any, *rest: Any, **given: Any) -> None:
            device.given = given

        settings = {"__init__": init, "starting": lambda self: nullcontext(), "transfer": transfer, "description": ""}
        return type(kind.__name__, (kind,), settings)

    monkeypatch.setattr(vllm_rollout, "start_engine", start)
    monkeypatch.setattr(vllm_rollout, "DirectTransfer", moving(DirectTransfer))
    monkeypatch.setattr(vllm_rollout, "LoadTransfer", moving(LoadTransfer))
    group, grid = SimpleNamespace(size=lambda: 1), TrainingGrid(dp=ep, ep=ep)
    mesh: Any = SimpleNamespace(training_grid=grid, tp=1, ep=ep, rank=0, world_group=group, device=torch.device("cpu"))
    spec: Any = SimpleNamespace(shape=SimpleNamespace(vocab_size=100, moe=SimpleNamespace(num_experts=4)))
    config = RolloutConfig(engine="vllm", free_cache_engine=free_cache, quantization=quantization)
    return VLLMRolloutEngine(
        nn.Linear(1, 1), spec, mesh, config,
        dtype=torch.float32, decode=str, eos_ids=[2], tokenizer_folder="", max_model_len=64, weights=way, seed=0,
    )  # fmt: skip


@pytest.mark.parametrize("way", ["direct", "load"])
def test_order_of_a_switch(way: Literal["direct", "load"], device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(device, monkeypatch, way)
    assert device.calls == ["sleep 2"], "an engine that has started gives the turn to training"
    for _ in range(2):
        device.calls.clear()
        engine.sync_weights()
        assert device.calls == SWITCH
        engine.release()
        assert device.calls == [*SWITCH, "sleep 2"]


@pytest.mark.parametrize("way", ["direct", "load"])
def test_training_makes_room_before_the_cache_comes(
    way: Literal["direct", "load"], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM has copied everything; what training gives up is not the engine's."""
    engine = make(device, monkeypatch, way)

    def copied() -> None:
        device.note("copied")
        device.training -= 4000

    engine.when_copied = copied
    for _ in range(2):
        device.calls.clear()
        device.training = 5000
        held = engine.sync_weights().held
        assert device.calls == [*SWITCH[:3], *(["copied"] if way == "load" else []), *SWITCH[3:]]
        assert held == HeldBytes(FIXED, FIXED + WEIGHTS, FIXED + WEIGHTS + CACHE)
        engine.release()


@pytest.mark.parametrize("way", ["direct", "load"])
def test_memory_is_lent_within_a_turn(
    way: Literal["direct", "load"], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Level 1, which keeps the weights that the transfer has written; nothing is transferred again, and nothing found
    in the cache. What training takes and keeps meanwhile is not the engine's."""
    engine = make(device, monkeypatch, way)
    flat = HeldBytes(FIXED, FIXED + WEIGHTS, FIXED + WEIGHTS + CACHE)
    for _ in range(2):
        assert engine.sync_weights().held == flat
        device.calls.clear()
        with engine.memory_lent():
            assert device.calls == ["sleep 1"] and device.engine == FIXED
            assert engine.absent.now == WEIGHTS + CACHE
            with pytest.raises(AssertionError, match="while training has its turn"):
                engine.generate([], SamplingParams())
            device.training += 2000
        assert device.calls == ["sleep 1", "wake weights", "wake kv_cache", "reset"]
        assert device.engine == FIXED + WEIGHTS + CACHE and engine.absent.now == 0
        engine.release()
        assert device.calls[-1] == "sleep 2"
    with pytest.raises(AssertionError, match="call sync_weights first"), engine.memory_lent():
        pass


def test_an_engine_that_keeps_its_memory_lends_none(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(device, monkeypatch, "direct", free_cache=False)
    engine.sync_weights()
    device.calls.clear()
    with engine.memory_lent():
        assert device.engine == FIXED + WEIGHTS + CACHE
    assert device.calls == []


def test_training_that_keeps_what_it_was_lent_is_told_so(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(device, monkeypatch, "load")
    engine.sync_weights()
    with pytest.raises(ConfigError, match=r"vLLM's cache of .* does not fit beside what training keeps"):  # noqa: SIM117
        with engine.memory_lent():
            device.training = TOTAL - device.engine - WEIGHTS - CACHE + 1


def test_an_engine_that_keeps_its_memory_is_only_filled(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(device, monkeypatch, "direct", free_cache=False)
    report = engine.sync_weights()
    engine.release()
    assert device.calls == ["gather", "transfer", "reset"]
    everything = FIXED + WEIGHTS + CACHE
    assert report.held == HeldBytes(everything, everything, everything)


def test_a_cache_that_is_not_emptied_is_an_error(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(device, monkeypatch, "load")
    monkeypatch.setattr(FakeLLM, "reset_prefix_cache", lambda self: False)
    with pytest.raises(AssertionError, match="its cache can't be emptied"):
        engine.sync_weights()


def test_seconds_of_the_transfer_and_of_the_turn(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(device, monkeypatch, "direct")
    first = engine.sync_weights()
    assert (first.transfer_seconds, first.seconds, first.release_seconds) == (2.0, 11.75, 0.0)
    engine.release()
    second = engine.sync_weights()
    assert (second.transfer_seconds, second.seconds, second.release_seconds) == (2.0, 11.75, 4.0)
    assert (second.bytes_aliased, second.bytes_copied, second.bytes_sent, second.peak_bytes) == (1, 2, 3, 4)


def test_held_bytes_are_measured_in_every_turn(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training's memory, and what torch keeps for later, are not the engine's, whatever they become."""
    engine = make(device, monkeypatch, "direct")
    flat = HeldBytes(FIXED, FIXED + WEIGHTS, FIXED + WEIGHTS + CACHE)
    for training, cached in ((5000, 0), (9000, 700), (300, 20_000)):
        device.training, device.cached = training, cached
        assert engine.sync_weights().held == flat
        engine.release()
    device.leak = 7
    device.training = 8000
    assert engine.sync_weights().held == flat
    engine.release()
    device.training = 100
    assert engine.sync_weights().held == HeldBytes(FIXED + 7, FIXED + WEIGHTS + 7, FIXED + WEIGHTS + CACHE + 7)
    device.engine += 3  # what generation takes and keeps
    engine.release()
    assert engine.sync_weights().held.asleep == FIXED + 7 + 7 + 3


def test_growth_shows_without_sleep_too(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(device, monkeypatch, "load", free_cache=False)
    engine.sync_weights()
    device.engine += 5
    engine.release()
    device.training += 70
    everything = FIXED + WEIGHTS + CACHE + 5
    assert engine.sync_weights().held == HeldBytes(everything, everything, everything)


def test_a_transfer_knows_how_vllm_holds_the_weights(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    make(device, monkeypatch, "auto", ep=2)
    assert device.given == {"expert_parallel": True, "bucket_bytes": 256 << 20}
    make(device, monkeypatch, "auto", quantization="fp8")
    assert device.given == {"expert_parallel": False, "quantization": "fp8"}
