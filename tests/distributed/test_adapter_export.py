"""Adapters go to the writing rank alone, tensor by tensor; the file is the one they were read from, byte for byte."""

import hashlib
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megappo.models.adapter_map import adapter_map, adapter_targets, missing_expert_tensors
from megappo.models.architecture import read_model
from megappo.models.hf_folder import ADAPTER_WEIGHTS
from megappo.models.tensor_file import TensorFile
from megappo.models.weight_map import Shape
from tests.distributed.programs.adapter_export import CASES, Case
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_model


def shapes(folder: Path, case: Case) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """The tensors of the adapters, and those that stand in the file for PEFT alone."""
    spec = read_model(folder / case.model)
    base = spec.family.weight_map(spec.shape, case.head)
    weight_map = adapter_map(base, adapter_targets(base, case.lora.target_modules), case.lora, case.head)
    return dict(weight_map.tensors), missing_expert_tensors(base, weight_map, case.lora.rank)


def noise(name: str, shape: Shape) -> torch.Tensor:
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
    return torch.randn(shape, generator=torch.Generator().manual_seed(key))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and for each case a folder of adapters with other numbers in every tensor, saved by safetensors."""
    folder = tmp_path_factory.mktemp("adapters")
    tiny_model(folder / "dense", "qwen2", num_layers=4)
    tiny_model(folder / "moe", "qwen2_moe", num_layers=2, num_kv_heads=4, num_heads=4)
    for case in CASES.values():
        (folder / case.source).mkdir(exist_ok=True)
        own, missing = shapes(folder, case)
        tensors = {name: noise(name, shape).to(case.dtype) for name, shape in own.items()}
        tensors |= {name: torch.zeros(shape, dtype=case.dtype) for name, shape in missing.items()}
        save_file(tensors, folder / case.source / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> dict[str, list[dict[str, int]]]:
    found: Any = run_ranks("tests.distributed.programs.adapter_export", "--folder", folder, nproc=4)
    return dict(found)


@pytest.mark.parametrize("name", CASES)
def test_the_file_is_the_one_that_was_read(folder: Path, ranks: dict[str, Any], name: str) -> None:
    written, read = ((folder / each / ADAPTER_WEIGHTS).read_bytes() for each in (name, CASES[name].source))
    assert written == read
    assert not (folder / f".{name}.partial").exists()


@pytest.mark.parametrize("name", CASES)
def test_only_the_writer_is_sent_anything(folder: Path, ranks: dict[str, Any], name: str) -> None:
    writer, *others = ranks[name]
    assert [rank["received"] for rank in others] == [0, 0, 0]
    assert [rank["gathered everywhere"] for rank in ranks[name]] == [0] * 4
    own, _ = shapes(folder, CASES[name])
    of_layer: dict[str, int] = defaultdict(int)
    for tensor, shape in own.items():
        found = re.search(r"layers\.(\d+)\.", tensor)
        of_layer[found[1] if found else "head"] += CASES[name].dtype.itemsize * torch.Size(shape).numel()
    assert 0 < writer["received"] < sum(of_layer.values())
    # No rank has more of tensors that are not whole than a layer's.
    assert max(rank["held"] for rank in ranks[name]) <= max(of_layer.values()) <= sum(of_layer.values()) / 2


def test_a_file_of_several_types_and_of_what_never_came(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {
        "b": torch.arange(3, dtype=torch.bfloat16), "a": torch.arange(6.0).view(2, 3), "ä": torch.zeros(2, 0),
        "c": torch.zeros(5),
    }  # fmt: skip
    with TensorFile(tmp_path / "file", {name: (one.dtype, tuple(one.shape)) for name, one in tensors.items()}) as file:
        for name in ("ä", "b", "a"):
            file.put(name, tensors[name])
        with pytest.raises(AssertionError, match="another tensor"):
            file.put("c", torch.ones(4))
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], one) and found[name].dtype == one.dtype for name, one in tensors.items())
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "file").read_bytes() == (tmp_path / "theirs").read_bytes()
