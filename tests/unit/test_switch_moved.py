"""A switch on one rank, into parameters with vLLM's names: what was moved to other memory is named and repaired."""

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megappo.engines.hybrid.execute import Switch
from megappo.engines.hybrid.lost_ranks import SwitchError, await_device, lost_ranks_named
from megappo.engines.hybrid.messages import Views
from megappo.engines.hybrid.staging import DevicePeak, MemoryMeter
from megappo.engines.hybrid.transfers import Transfer
from megappo.engines.rollout import WorstTensor
from megappo.engines.vllm.destination import VLLMDestination
from tests.support.engine_stand_in import engine_stand_in
from tests.unit.test_reshard_plan import planner

QKV, OUT = "model.layers.2.self_attn.qkv_proj.weight", "model.layers.2.self_attn.o_proj.weight"


class Shards:
    """Training parameters of one rank, random, made as they are asked for."""

    def __init__(self, lengths: dict[str, int]) -> None:
        self.lengths = lengths
        self.tensors: dict[str, Tensor] = {}

    def views(self, transfer: Transfer) -> Views:
        name = transfer.source_name
        if name not in self.tensors:
            length, width = self.lengths[transfer.source], transfer.width
            shape = (length,) if width is None else (length, width) if transfer.axis == 0 else (width, length)
            self.tensors[name] = torch.randn(shape)
        return (self.tensors[name].narrow(transfer.axis, transfer.source_offset, transfer.length),)


@pytest.fixture
def made() -> tuple[Switch, torch.nn.Module, Shards]:
    """Query, key and value rows of several KV heads are copied, everything else is training's memory."""
    torch.manual_seed(0)
    plan = planner("tiny-llama", "1-1-1", 1, "vllm")
    shards = Shards({kind.name: kind.length(1) for kind in plan.kinds.kinds})
    model = engine_stand_in(plan.targets.of(0))
    switch = Switch(plan, 0, shards, VLLMDestination(model, torch.device("cpu")), None)
    switch.run()
    return switch, model, shards


def test_a_copied_parameter_in_other_memory(made: tuple[Switch, torch.nn.Module, Shards]) -> None:
    switch, model, _ = made
    assert switch.differences() == {} and switch.worst_tensor() is None
    parameter = model.get_parameter(QKV)
    right = parameter.detach().clone()
    assert right.count_nonzero() == right.numel()
    parameter.data = torch.zeros_like(right)
    assert switch.worst_tensor() == WorstTensor(float(right.abs().max()), QKV)
    parameter.data[5, 3] = torch.nan
    assert switch.worst_tensor() == WorstTensor(torch.inf, QKV)
    switch.run()
    assert torch.equal(parameter, right) and switch.worst_tensor() is None


def test_a_parameter_object_that_was_exchanged(made: tuple[Switch, torch.nn.Module, Shards]) -> None:
    """One that was copied and one that was training's memory."""
    switch, model, shards = made
    right = model.get_parameter(QKV).detach().clone()
    for name in (QKV, OUT):
        module = model.get_submodule(name.removesuffix(".weight"))
        module.weight = torch.nn.Parameter(torch.zeros_like(module.weight), requires_grad=False)
    assert switch.differences() == {QKV: float(right.abs().max()), OUT: torch.inf}
    switch.run()
    assert torch.equal(model.get_parameter(QKV), right)
    name = "decoder.layers.2.self_attention.linear_proj.weight"
    assert model.get_parameter(OUT).data_ptr() == shards.tensors[name].data_ptr()
    assert switch.differences() == {}


def test_views_are_made_once_while_nothing_moves(
    made: tuple[Switch, torch.nn.Module, Shards], monkeypatch: pytest.MonkeyPatch
) -> None:
    switch, model, _ = made
    asked: list[str] = []
    view = VLLMDestination.view

    def noted(self: VLLMDestination, transfer: Transfer) -> Tensor:
        asked.append(transfer.target_name)
        return view(self, transfer)

    monkeypatch.setattr(VLLMDestination, "view", noted)
    switch.run()
    assert asked == []
    model.get_parameter(QKV).data = torch.zeros_like(model.get_parameter(QKV))
    switch.run()
    assert QKV in asked


class Request:
    """Of a GPU that is done after so many looks."""

    def __init__(self, looks: float) -> None:
        self.looks = looks

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_a_gpu_that_never_ends_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As NCCL's requests are where a rank is gone: nothing is raised, `wait` has long returned."""
    slow: list[dist.Work] = [Request(0), Request(3)]  # type: ignore[list-item]
    await_device(slow, limit=60)
    hanging: list[dist.Work] = [Request(0), Request(torch.inf)]  # type: ignore[list-item]
    start = time.monotonic()
    told = r"bucket 3 of 7 failed, a rank is gone or did not answer in time \(not done after 0.2 s\)"
    with pytest.raises(SwitchError, match=told), lost_ranks_named("bucket 3 of 7"):
        await_device(hanging, limit=0.2)
    assert 0.2 <= time.monotonic() - start < 20


def test_memory_is_alive_as_long_as_a_view_of_it() -> None:
    meter = MemoryMeter()
    first = meter.allocate(100, torch.device("cpu"))
    part = first[:10].view(torch.int16)
    del first
    meter.allocate(50, torch.device("cpu"))
    assert meter.peak_bytes == 150
    del part
    meter.watch([torch.zeros(30)])
    assert meter.peak_bytes == 150  # 120 now
    second = meter.allocate(151, torch.device("cpu"))
    assert meter.peak_bytes == 151 == len(second)


def test_a_gpus_peak_counts_from_what_was_held_before(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"current": 700, "peak": 1000}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda: {"requested_bytes": {"all": held}})
    peak = DevicePeak()
    held = {"current": 720, "peak": 1000}  # less than what was held once: nothing can be told
    assert peak.extra_bytes == 0
    held = {"current": 720, "peak": 1001}
    assert peak.extra_bytes == 301
