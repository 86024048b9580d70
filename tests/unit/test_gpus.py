"""Which GPU a rank takes, and in which place of NCCL and vLLM it stands, without a GPU."""

import os

import pytest
import torch

from megappo.config.layout import LayoutConfig
from megappo.config.shared_gpus import RANKS_PER_GPU, ranks_per_gpu
from megappo.engines.vllm import environment
from megappo.errors import ConfigError
from megappo.launcher.world import local_world_size
from megappo.parallel.gpus import take_gpu

NAMES = ("NCCL_HOSTID", "NCCL_NET", "NCCL_SOCKET_IFNAME", RANKS_PER_GPU, "VLLM_ALLREDUCE_USE_SYMM_MEM")


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `take_gpu` writes ends with the test."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def taken(
    monkeypatch: pytest.MonkeyPatch, rank: int, gpus: int, *, local: int, world: int, most: str | None = None
) -> tuple[int, str]:
    """The GPU of a rank of `world`, of which `local` are on each machine, and what vLLM reads as its place."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    place = {"RANK": rank, "LOCAL_RANK": rank % local, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    if most is not None:
        monkeypatch.setenv(RANKS_PER_GPU, most)
    take_gpu()
    (gpu,) = chosen
    return gpu, os.environ["LOCAL_RANK"]


def test_a_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [taken(monkeypatch, rank, 2, local=2, world=4) for rank in range(4)] == [(0, "0"), (1, "1")] * 2
    assert not [name for name in NAMES if name in os.environ]


def test_ranks_on_one_gpu_pass_for_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    places = []
    for rank in range(4):
        assert taken(monkeypatch, rank, 2, local=4, world=4, most="2") == (rank % 2, str(rank % 2))
        places.append(os.environ["NCCL_HOSTID"])
    assert len(set(places)) == 4
    assert (os.environ["NCCL_NET"], os.environ["NCCL_SOCKET_IFNAME"]) == ("Socket", "lo")


def test_ranks_of_several_machines_keep_their_network(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(monkeypatch, 3, 1, local=2, world=4, most="2") == (0, "0")
    assert "NCCL_HOSTID" in os.environ and "NCCL_NET" not in os.environ and "NCCL_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize(("rank", "most", "told"), [(0, None, 1), (2, "1", 1), (0, "2", 2)])
def test_more_ranks_than_gpus_take_are_refused_on_all(
    monkeypatch: pytest.MonkeyPatch, rank: int, most: str | None, told: int
) -> None:
    with pytest.raises(ConfigError) as refused:
        taken(monkeypatch, rank, 1, local=3, world=3, most=most)
    assert str(refused.value).startswith(f"3 ranks on this machine, but 1 visible GPUs for {told} each; ")
    assert str(refused.value).endswith("set MEGAPPO_RANKS_PER_GPU to 3")


def test_as_many_ranks_are_started_as_gpus_take(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs 2 ranks, and this machine has 1 GPUs; start at most 1, use more"):
        local_world_size(LayoutConfig(tp=2), None, num_gpus=1)
    monkeypatch.setenv(RANKS_PER_GPU, "2")
    assert local_world_size(LayoutConfig(tp=2), None, num_gpus=1) == 2
    assert local_world_size(LayoutConfig(), None, num_gpus=2) == 4
    assert local_world_size(LayoutConfig(), 1, num_gpus=2) == 1
    with pytest.raises(ConfigError, match="--nproc 3: needs 3 ranks, and this machine has 1 GPUs; start at most 2"):
        local_world_size(LayoutConfig(), 3, num_gpus=1)


@pytest.mark.parametrize("text", ["0", "-1", "two", ""])
def test_numbers_of_ranks_that_are_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(RANKS_PER_GPU, text)
    with pytest.raises(ConfigError, match=f"MEGAPPO_RANKS_PER_GPU: '{text}' is no number of ranks"):
        ranks_per_gpu()


@pytest.mark.parametrize(("most", "expected"), [("1", None), ("2", "0")])
def test_vllm_takes_no_symmetric_memory_on_a_shared_gpu(
    monkeypatch: pytest.MonkeyPatch, most: str, expected: str | None
) -> None:
    monkeypatch.setenv(RANKS_PER_GPU, most)
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: name)
    for name in environment._VARIABLES | environment._VARIABLES_ON_CPU:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    environment.prepare_environment()
    assert os.environ.get("VLLM_ALLREDUCE_USE_SYMM_MEM") == expected
