"""Unequal pipeline stages: the one-rank optimizer steps, generation, and checkpoints that other layouts load."""

from typing import Any

import pytest

from tests.support.parity import Runs, parity_runs
from tests.support.ranks import run_ranks
from tests.support.runs import write_run_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow  # in short: test_together.py

FIRST = "layout.pp=2,layout.num_layers_in_first_pipeline_stage=1"
LOSS = "layout.pp=2,layout.account_for_loss_in_pipeline_split=true"
RECOMPUTE = "model.recompute_granularity=full,model.recompute_method=block,model.recompute_num_layers=2"
# Of three layers: one and two; two and one.
LAYOUTS = {"first": FIRST, "loss-recompute": f"{LOSS},{RECOMPUTE}"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("pipelines")
    actor = tiny_tokenizer(tiny_model(folder / "actor", "qwen3", tied=True, num_layers=3))
    critic = tiny_tokenizer(tiny_model(folder / "critic", "qwen3", tied=True, num_layers=3, value_head=True, seed=1))
    return parity_runs(folder, actor, critic, {1: {"one": ""}, 2: LAYOUTS})


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_and_weights_equal_one_rank(runs: Runs, name: str, role: str) -> None:
    gradients, changes = runs.gradients(name, role), runs.changes(name, role)
    assert gradients.relative <= 1e-5, gradients
    assert changes.relative <= 1e-3, changes


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_equal_one_rank(runs: Runs, name: str) -> None:
    assert runs.losses(name) <= 1e-5


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Metrics of whole runs, which generate themselves."""
    folder = tmp_path_factory.mktemp("stages")
    config = write_run_experiment(folder)
    model = tiny_tokenizer(tiny_model(folder / "three", num_layers=3))
    common = f"model.path={model},trainer.total_steps=2,trainer.save_last=false,data.val_files=[],trainer.test_freq=0"

    def words(**runs: str) -> list[str]:
        return [
            ",".join(filter(None, (f"{name}=trainer.run_dir={folder / name}", common, more)))
            for name, more in runs.items()
        ]

    def run(num_ranks: int, **runs: str) -> dict[str, Any]:
        arguments = ("--config", config, "--runs", *words(**runs))
        found = run_ranks("tests.distributed.programs.offload", *arguments, nproc=num_ranks)
        return {name: result["metrics"] for name, result in found.items()}

    own = "rollout.tensor_model_parallel_size=1"
    found = run(2, stages=f"{FIRST},trainer.save_freq=1", moved=f"{LOSS},{own}")
    return found | run(1, one="", resumed=f"trainer.resume={folder}/stages/checkpoints/step-000001")


@pytest.mark.parametrize("name", ["stages", "moved"])
def test_generation_through_unequal_stages_and_from_them(whole: dict[str, Any], name: str) -> None:
    """The native engine decodes through the stages, or takes the layers of both into a layout of one rank."""
    assert whole[name][0]["hybrid/probe_diff_max"] <= 1e-5
    for ours, one in zip(whole[name], whole["one"], strict=True):
        assert ours["response_length/mean"] == one["response_length/mean"]
        assert ours["rollout/log_prob_diff_max"] <= 1e-5
        for key in ("actor/pg_loss", "critic/vf_loss", "actor/entropy"):
            assert ours[key] == pytest.approx(one[key], abs=2e-5)


def test_one_rank_goes_on_from_unequal_stages(whole: dict[str, Any]) -> None:
    (ours,), one = whole["resumed"], whole["one"][1]
    assert ours["step"] == 2
    for key in ("actor/pg_loss", "critic/vf_loss", "actor/grad_norm"):
        assert ours[key] == pytest.approx(one[key], abs=2e-5)
