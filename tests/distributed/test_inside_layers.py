"""What settings do inside of the layers of a run: routers in float32, and adapters' inputs that are left out."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.programs.inside_layers import DROPOUT
from tests.support.parity import write_experiment
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("inside")
    model = tiny_tokenizer(tiny_model(folder / "model", "llama"))
    file = tiny_tokenizer(tiny_model(folder / "ties", "qwen3_moe", norm_topk_prob=True)) / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(0)
    for name, rows in tensors.items():
        if name.endswith("mlp.gate.weight"):
            # Rows of experts that are large and alike: logits of a token differ by about their rounding in bfloat16.
            rows[:] = (16 * rows[:1]).bfloat16().float() + 0.004 * torch.randn(rows.shape, generator=generator)
    save_file(tensors, file, {"format": "pt"})
    config = write_experiment(folder, model, model)
    result: dict[str, Any] = run_ranks(
        "tests.distributed.programs.inside_layers", "--config", config, "--folder", folder, nproc=1
    )
    return result


def test_a_router_of_a_bfloat16_model_computes_in_float32(found: dict[str, Any]) -> None:
    routers = found["routers"]
    assert routers["tokens"] > 1000
    assert routers["changed_by_rounding"] > 0.1 * routers["tokens"], "ties are near enough that bfloat16 would decide"
    assert routers["wrong"] == 0 and routers["weight"] < 1e-5


def test_dropout_of_adapters_is_for_updates_alone(found: dict[str, Any]) -> None:
    passes = found["dropout"]
    inputs = sum(each["inputs"] for each in passes["update"])
    dropped = sum(each["dropped"] * each["inputs"] for each in passes["update"]) / inputs
    assert inputs > 20_000 and dropped == pytest.approx(DROPOUT, abs=0.015)  # five standard deviations of a share
    for each in passes["update"]:
        assert each["dropped"] == pytest.approx(DROPOUT, abs=0.06)
        assert each["scaled"] < 1e-4 < 1e-2 < each["plain"]
    assert len({each["mask"] for each in passes["update"]}) == len(passes["update"]), "each pass draws anew"
    assert passes["log_probs"] and passes["reference"]
    for each in passes["log_probs"]:
        assert each["dropped"] < 0.01 and each["plain"] < 1e-4
    assert all(each["dropped"] == 1.0 for each in passes["reference"])
