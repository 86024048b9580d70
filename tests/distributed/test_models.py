"""Megatron models of every family on one, two and four ranks, against Hugging Face's forward and files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.model_cases import (
    BF16_MODEL,
    LANGUAGE_MODELS,
    MOE_MODELS,
    MOE_VALUE_MODEL,
    VALUE_MODEL,
    VARIED_VALUE_MODEL,
    make_models,
)
from tests.support.ranks import run_ranks

LAYOUTS = ("tp1", "tp2", "tp2sp", "pp2")
EXPERT_LAYOUTS = ("ep2", "etp2", "tp2sp-ep2", "tp2sp-etp2", "tp2sp-ep2-etp2", "ep2-pp2")
"""Layouts that the models with experts run on alone; the last two have four ranks."""

MOE_CASES = (*MOE_MODELS, *(f"{case}, sequential" for case in MOE_MODELS), MOE_VALUE_MODEL)
"""Each with the project's grouped experts, and with one module an expert."""


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

    return run(1, "tp1") | run(2, *LAYOUTS[1:], *EXPERT_LAYOUTS[:-2]) | run(4, *EXPERT_LAYOUTS[-2:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_hugging_faces(results: dict[str, dict[str, float]], layout: str) -> None:
    differences = dict(results[layout])
    print(layout, differences)
    assert differences.pop("vocab") < 1e-12
    assert differences.pop("vocab gradient") < 1e-12
    assert differences.pop("zero value head") == 0
    if layout != "pp2":
        assert differences.pop("packed") <= 1e-5
    for case in MOE_CASES:
        del differences[case]
    differences.pop("packed experts", None)
    assert set(differences) == {*LANGUAGE_MODELS, VALUE_MODEL, VARIED_VALUE_MODEL}
    assert max(differences.values()) <= 1e-4


@pytest.mark.parametrize("layout", [*LAYOUTS, *EXPERT_LAYOUTS])
def test_numbers_of_models_with_experts_are_hugging_faces(results: dict[str, dict[str, float]], layout: str) -> None:
    differences = {case: results[layout][case] for case in MOE_CASES}
    print(layout, differences)
    assert max(differences.values()) <= 1e-4
    if "pp2" not in layout:
        # Also: what else is in a micro-batch, padding or other sequences, does not change a token's result.
        assert results[layout]["packed experts"] <= 1e-5


EXPORTS = [
    *((layout, case) for layout in LAYOUTS for case in (*LANGUAGE_MODELS, VALUE_MODEL, VARIED_VALUE_MODEL, BF16_MODEL)),
    *((layout, case) for layout in (*LAYOUTS, *EXPERT_LAYOUTS) for case in MOE_CASES),
]


@pytest.mark.parametrize(("layout", "case"), EXPORTS)
def test_export_returns_every_tensor(
    folder: Path, results: dict[str, dict[str, float]], layout: str, case: str
) -> None:
    source = stored(folder / case.removesuffix(", sequential"))
    export = stored(folder / "exports" / layout / case)
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
    # The experts of each rank are files of their own.
    experts = AutoModelForCausalLM.from_pretrained(exports.parent / "ep2" / "qwen3_moe")
    expected = stored(folder / "qwen3_moe")["model.layers.1.mlp.experts.3.down_proj.weight"]
    assert torch.equal(experts.model.layers[1].mlp.experts.down_proj[3], expected)
    critic = AutoModelForSequenceClassification.from_pretrained(exports / VALUE_MODEL)
    assert torch.equal(critic.score.weight, stored(folder / VALUE_MODEL)["score.weight"])


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
