"""A tensor that vLLM has wrong, though its loader took it, is named by the check of the switch."""

import json
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.runs import write_run_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.vllm

DENSE, EXPERTS = "model.layers.1.self_attn.qkv_proj", "model.layers.1.mlp.experts.routed_experts"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two ranks, on which vLLM spreads the weights, packed as it does on a CPU, or as they are."""
    folder = tmp_path_factory.mktemp("named")
    experiment = write_run_experiment(folder)
    # Two KV heads a rank: the fused parameter is never training's own memory.
    settings = {"vocab_size": 131, "hidden_size": 128, "head_dim": 32, "num_heads": 8, "num_kv_heads": 4}
    tiny_tokenizer(tiny_model(folder / "model", "qwen3", tied=True, **settings), 131)
    experts = tiny_model(folder / "experts", "qwen3_moe", moe_intermediate_size=64, **settings)
    tiny_tokenizer(experts, 131)
    overrides = ["rollout.engine=vllm", "hybrid.weights=load", "layout.tp=2"]
    moe = [*overrides, f"model.path={experts}", "layout.sequence_parallel=true"]
    runs = {
        "load": {"overrides": overrides, "break": DENSE},
        "direct": {"overrides": [*overrides, "hybrid.weights=direct"], "break": DENSE},
        "experts": {"overrides": moe, "break": EXPERTS},
    }
    (folder / "runs.json").write_text(json.dumps(runs))
    arguments = ("--config", experiment, "--folder", folder / "out", "--runs", folder / "runs.json")
    return run_ranks("tests.vllm.programs.named", *arguments, nproc=2, torchrun=True)


@pytest.mark.parametrize("way", ["load", "direct"])
def test_a_broken_matrix_is_named_with_its_rank(way: str, results: dict[str, Any]) -> None:
    assert results[way]["untouched"] == "None"
    error = results[way]["error"]
    assert "though they were sent twice" in error
    assert f"wrong tensor: {DENSE}.weight (off by " in error and "at most), on rank 1" in error


def test_where_nothing_can_be_read_the_error_says_what_to_do(results: dict[str, Any]) -> None:
    untouched, error = results["experts"]["untouched"], results["experts"]["error"]
    note = "none of those that can be read back, and 4 can't be, which are packed for a CPU's kernels"
    assert untouched.startswith(note)
    assert f"wrong tensor: {note}" in error and "hybrid.weights=direct leaves them as they are" in error
