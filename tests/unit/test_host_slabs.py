"""Host memory of what is offloaded: how much is held for it, what it keeps, and when it goes."""

import gc
import itertools
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from megappo.engines import offload
from megappo.engines.host_slabs import HostSlabs, pageable_slab, slab_sizes
from megappo.engines.offload import Memory, RoleMemory
from tests.support.odd_sizes import ODD_SIZES

CPU = torch.device("cpu")
GIB, MIB = 1 << 30, 1 << 20
LAYER = [4608 * 3584, 4608, 3584 * 3584, 2 * 18944 * 3584, 3584 * 18944, 3584, 3584]
QWEN_7B = [152064 * 3584, *(28 * LAYER), 3584, 152064 * 3584]
"""Numbers of each parameter of Qwen2.5-7B on one rank."""
WEIGHTS = [2 * count for count in QWEN_7B]
"""Bytes of a reference's parameters in bfloat16."""
STATES = [4 * count for count in QWEN_7B for _ in range(3)]
"""Bytes of its optimizer: two moments and a float32 copy of each parameter."""


def without_bytes(num_bytes: int) -> Tensor:
    """Has a size and addresses of views alone."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="meta")


def rounded_up(size: int) -> int:
    """What torch pins for a block."""
    return 1 << (size - 1).bit_length()


def test_slabs_of_a_7b_model_pin_what_is_kept() -> None:
    kept = sum(WEIGHTS) + sum(STATES)
    assert f"{kept / GIB:.1f}" == "99.3"
    assert f"{sum(map(rounded_up, WEIGHTS + STATES)) / GIB:.1f}" == "187.3"
    pinned = 0
    for sizes in (WEIGHTS, STATES):
        slabs = HostSlabs(without_bytes)
        places = slabs.places(sizes)
        assert [sum(piece.nbytes for piece in place) for place in places] == sizes
        pinned += slabs.num_bytes
    assert f"{pinned / GIB:.1f}" == "99.3"


@pytest.mark.parametrize("total", [1, 4095, 4097, 100_001, 3 * MIB + 1, 65 * MIB, GIB - 1, 5 * GIB + 1, 107 * GIB // 5])
def test_slabs_are_powers_of_two_and_little_more_than_asked_for(total: int) -> None:
    sizes = slab_sizes(total)
    assert all(size == rounded_up(size) for size in sizes), "torch pins what it is asked for"
    assert total <= sum(sizes) <= max(total + total // 16, total + 4096)
    assert len(sizes) <= total // GIB + 6 and max(sizes) <= GIB


def test_slabs_by_hand() -> None:
    assert slab_sizes(0) == []
    assert slab_sizes(24) == [4096]
    assert slab_sizes(2 * GIB + 600 * MIB) == [GIB, GIB, 512 * MIB, 64 * MIB, 64 * MIB]
    # A sixteenth of 96 MiB is 6, in which 4 fit: nothing is smaller.
    assert slab_sizes(99 * MIB) == [64 * MIB, 32 * MIB, 4 * MIB]


def test_places_do_not_overlap_and_are_aligned() -> None:
    slabs = HostSlabs(without_bytes)
    sizes = [1, 511, 513, GIB - 1024, 3 * GIB + 7, 5, 0, 2048]
    places = slabs.places(sizes)
    assert [[piece.nbytes for piece in place] for place in places] == [
        [1], [511], [513], [GIB - 2048, 1024], [GIB - 1024, GIB, GIB, 1031], [5], [], [2048],
    ]  # fmt: skip
    ends: dict[int, int] = {}
    for piece in itertools.chain.from_iterable(places):
        slab = id(piece._base)
        assert piece.storage_offset() % 512 == 0
        assert piece.storage_offset() >= ends.get(slab, 0), "it begins behind the one before in its slab"
        ends[slab] = piece.storage_offset() + piece.nbytes
    assert len(ends) == 5


def test_slabs_follow_what_is_kept() -> None:
    made: list[int] = []

    def new_slab(num_bytes: int) -> Tensor:
        made.append(num_bytes)
        return without_bytes(num_bytes)

    slabs, held = HostSlabs(new_slab), []
    for mib in (96, 96, 352, 340, 100, 0, 32):
        slabs.places([mib * MIB])
        held.append(slabs.num_bytes // MIB)
    assert held == [96, 96, 352, 352, 100, 0, 32]
    # The first two keep, 256 more are got, 12 less are not worth it; of 100 only 4 are new.
    assert made == [size * MIB for size in (64, 32, 256, 4, 32)]


def role(of_kind: Callable[[], Sequence[Tensor]]) -> RoleMemory:
    return RoleMemory({"optimizer": of_kind}, ["optimizer"], CPU)


@pytest.fixture
def slabs_made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
    made: list[weakref.ref[Tensor]] = []

    def new_slab(num_bytes: int) -> Tensor:
        slab = pageable_slab(num_bytes).fill_(0xAB)
        made.append(weakref.ref(slab))
        return slab

    monkeypatch.setattr(offload, "pageable_slab", new_slab)
    return made


def test_values_come_back_bit_for_bit_from_the_same_slabs(slabs_made: list[weakref.ref[Tensor]]) -> None:
    generator = torch.Generator().manual_seed(0)
    start = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator) for size in ODD_SIZES]
    states = [one.clone() for one in start]
    memory = role(lambda: states)
    for turn in range(10):
        memory.rest()
        assert memory.device_bytes("optimizer") == 0 and memory.host_bytes == sum(ODD_SIZES)
        assert sum(ODD_SIZES) <= memory.host_reserved_bytes <= 1.1 * sum(ODD_SIZES)
        memory.need("optimizer")
        assert memory.host_bytes == 0 and memory.host_reserved_bytes >= sum(ODD_SIZES)
        for one, first in zip(states, start, strict=True):
            assert torch.equal(one, first + turn)  # modulo 256
            one += 1
    assert len(slabs_made) == len(slab_sizes(sum(-(-size // 512) * 512 for size in ODD_SIZES)))


def test_slabs_go_with_their_owner(slabs_made: list[weakref.ref[Tensor]]) -> None:
    states = [torch.ones(10_000), torch.ones(333)]
    memory = role(lambda: states)
    memory.rest()
    assert [slab for slab in slabs_made if slab() is not None]
    memory.need("optimizer")
    del memory
    gc.collect()
    assert not [slab for slab in slabs_made if slab() is not None]


def test_states_of_a_loaded_checkpoint_take_the_places_of_the_old(slabs_made: list[weakref.ref[Tensor]]) -> None:
    states = [torch.full((size,), 1.0) for size in (70_000, 11, 130_001)]
    memory = role(lambda: states)
    memory.rest()
    memory.need("optimizer")
    made, old = len(slabs_made), weakref.ref(states[0])
    states[:] = [torch.full_like(state, 2.0) for state in states]
    gc.collect()
    assert old() is None
    memory.rest()
    memory.need("optimizer")
    assert len(slabs_made) == made and all(bool((state == 2).all()) for state in states)


def test_metrics_tell_what_is_held() -> None:
    state = torch.ones(3_000)
    memory = Memory([role(lambda: [state])])
    memory.rest()
    assert [memory.metrics("values")[f"memory/values/{name}"] for name in ("host", "host_reserved")] == [12000, 12288]
    memory.need_all()
    assert [memory.metrics("values")[f"memory/values/{name}"] for name in ("host", "host_reserved")] == [0, 12288]
