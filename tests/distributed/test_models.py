"""Megatron models of every family on two ranks and on one, against Hugging Face's forward and files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.model_cases import BF16_MODEL, LANGUAGE_MODELS, VALUE_MODEL, make_models
from tests.support.ranks import run_ranks

LAYOUTS = ("tp1", "tp2", "tp2sp", "pp2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    make_models(root)
    return root


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, dict[str, float]]:
    """Layout → check → largest absolute difference."""

    def run(nproc: int, *layouts: str) -> Any:
        return run_ranks(
            "tests.distributed.programs.log_probs", "--models", folder, "--exports", folder / "exports", "--layouts",
            *layouts, nproc=nproc,
        )  # fmt: skip

    return run(1, "tp1") | run(2, "tp2", "tp2sp", "pp2")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_hugging_faces(results: dict[str, dict[str, float]], layout: str) -> None:
    differences = dict(results[layout])
    print(layout, differences)
    assert differences.pop("vocab") < 1e-12
    assert differences.pop("vocab gradient") < 1e-12
    assert differences.pop("zero value head") == 0
    if layout != "pp2":
        assert differences.pop("packed") <= 1e-5
    assert set(differences) == {*LANGUAGE_MODELS, VALUE_MODEL}
    assert max(differences.values()) <= 1e-4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [*LANGUAGE_MODELS, VALUE_MODEL, BF16_MODEL])
def test_export_returns_every_tensor(
    folder: Path, results: dict[str, dict[str, float]], layout: str, case: str
) -> None:
    source, export = stored(folder / case), stored(folder / "exports" / layout / case)
    assert source.keys() == export.keys()
    for name, tensor in source.items():
        assert tensor.dtype == export[name].dtype, name
        assert torch.equal(tensor, export[name]), name


def test_hugging_face_loads_an_export(folder: Path, results: dict[str, dict[str, float]]) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    exports = folder / "exports" / "tp2"
    assert (exports / BF16_MODEL / "model.safetensors.index.json").is_file(), "20 kB files need an index"
    model = AutoModelForCausalLM.from_pretrained(exports / BF16_MODEL)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, stored(folder / BF16_MODEL)["lm_head.weight"])
    critic = AutoModelForSequenceClassification.from_pretrained(exports / VALUE_MODEL)
    assert torch.equal(critic.score.weight, stored(folder / VALUE_MODEL)["score.weight"])


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
