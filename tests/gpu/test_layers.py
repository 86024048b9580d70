"""Transformer Engine's layers and torch's are the same model: numbers, checkpoints, exports. `make test-gpu`."""

from pathlib import Path

import pytest
import torch

from megappo.parallel import runtime
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU on this machine"),
]
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")


@pytest.mark.skipif(not runtime.has_transformer_engine(), reason="Transformer Engine is not installed")
def test_transformer_engines_layers_against_torchs(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "num_heads": 4, "num_layers": 4, "dtype": torch.bfloat16}
    for family in FAMILIES:
        tiny_model(tmp_path / "models" / family, family, **sizes)
    results = run_ranks(
        "tests.distributed.programs.layers", "--models", tmp_path / "models", "--kinds", "te", "torch", nproc=1,
        torchrun=True,
    )  # fmt: skip
    assert results.keys() == set(FAMILIES)
    for family, found in results.items():
        print(family, found)
        rounding = found["to float32"]["torch"]
        assert rounding > 0
        assert found["to float32"]["te"] <= 2 * rounding and found["between"] <= 2 * rounding
        assert max(found["packed"].values()) <= 2 * rounding
        assert min(found["saved and exported"]) > 10
