"""Storages of a role on a GPU: freed and filled in place, beside a computation on the stream that owns them."""

import pytest
import torch

from megappo.engines.offload import RoleMemory
from tests.support.odd_sizes import ODD_SIZES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]
SIZE = 1 << 24


def test_a_role_leaves_the_device_and_comes_back() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    parameter, moment = (torch.arange(SIZE, dtype=torch.float32, device=device) for _ in range(2))
    gradient, view = torch.ones(SIZE, device=device), parameter[SIZE // 2 :]
    memory = RoleMemory(
        {"params": lambda: [parameter, view], "grads": lambda: [gradient], "optimizer": lambda: [moment]},
        ["params", "grads", "optimizer"],
        device,
    )
    torch.cuda.synchronize()
    for turn in range(3):
        before = torch.cuda.memory_allocated()
        memory.rest()
        # Takes the freed memory while copies out of it may still run.
        other = torch.full((3 * SIZE,), -1.0, device=device)
        assert memory.host_bytes == 2 * 4 * SIZE
        del other
        torch.cuda.synchronize()
        assert before - torch.cuda.memory_allocated() == 3 * 4 * SIZE
        memory.need("params")
        memory.begin("optimizer")
        view += 1
        memory.need("optimizer", "grads")
        moment -= 1
        start = torch.arange(SIZE, dtype=torch.float32, device=device)
        assert torch.equal(parameter[: SIZE // 2], start[: SIZE // 2])
        # Up to 2^24 float32 holds every whole number.
        assert torch.equal(view[:-4], start[SIZE // 2 : -4] + turn + 1)
        assert torch.equal(moment, start - turn - 1)


def test_odd_sizes_pin_little_more_than_they_are() -> None:
    """torch's own count of pinned memory, over ten turns."""
    device = torch.device("cuda", torch.cuda.current_device())
    generator = torch.Generator().manual_seed(0)
    start = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in ODD_SIZES]
    moments = [one.to(device) for one in start]
    memory = RoleMemory({"optimizer": lambda: moments}, ["optimizer"], device)
    torch.cuda.synchronize()
    torch.empty(1, pin_memory=True)  # torch counts blocks as given back when it looks for another one
    before = torch.cuda.host_memory_stats()["active_bytes.current"]
    for turn in range(10):
        memory.rest()
        # Takes the freed memory while copies out of it may still run.
        others = [torch.full_like(one, 0xAB, device=device) for one in start]
        pinned = torch.cuda.host_memory_stats()["active_bytes.current"] - before
        assert pinned == memory.host_reserved_bytes and sum(ODD_SIZES) <= pinned <= 1.1 * sum(ODD_SIZES)
        del others
        memory.need("optimizer")
        for one, first in zip(moments, start, strict=True):
            assert torch.equal(one.cpu(), first + turn)
            one += 1
