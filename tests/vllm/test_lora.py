"""Adapters that a run with vLLM has trained: merged into vLLM's weights, they give the trainer's log-probs."""

from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.runs import write_run_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.vllm

SETTINGS = (
    "rollout.engine=vllm", "layout.tp=2", "trainer.total_steps=2", "trainer.test_freq=0", "model.lora.rank=4",
    "model.lora.target_modules=[all-linear]", "actor.optim.lr=0.02", "actor.optim.lr_warmup_steps=0",
    "rollout.max_model_len=256",
)  # fmt: skip


EXPERTS = ("layout.ep=2", "layout.sequence_parallel=true")


@pytest.fixture(scope="module", params=["load", "direct", "direct-experts"])
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    weights, _, experts = request.param.partition("-")
    folder = tmp_path_factory.mktemp(f"lora-{request.param}")
    experiment = write_run_experiment(folder)
    if experts:
        tiny_model(folder / "model", "qwen3_moe", hidden_size=128, head_dim=32, moe_intermediate_size=64)
    else:
        tiny_model(folder / "model", "qwen2", hidden_size=128, head_dim=32)
    tiny_tokenizer(folder / "model")
    overrides = [*SETTINGS, *(EXPERTS if experts else ()), f"hybrid.weights={weights}"]
    found: dict[str, Any] = run_ranks(
        "tests.vllm.programs.lora", "--config", experiment, "--overrides", *overrides, nproc=2, torchrun=True
    )
    return found | {"weights": weights}


def test_merged_adapters_give_the_trainers_log_probs(result: dict[str, Any]) -> None:
    assert result["difference"] < 1e-4
    assert result["difference_without_adapters"] > 1e-2, "training changes log-probs, or the test shows nothing"


def test_frozen_weights_keep_every_bit(result: dict[str, Any]) -> None:
    assert result["base_is_unchanged"]


def test_adapted_matrices_are_copies(result: dict[str, Any]) -> None:
    """Directly, what is neither bound nor in vLLM's own order is a merged copy: all that adapters stand beside. Of
    experts, which ranks share in training and cut in vLLM, a part comes from the other rank."""
    assert result["copied"] + result["received"] >= result["adapted_bytes"]
    assert (result["aliased"] > 0) == (result["weights"] == "direct")
