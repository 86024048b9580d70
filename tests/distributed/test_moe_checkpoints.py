"""Checkpoints of models with experts: resumed to the bit at EP 2, to rounding where experts are laid out otherwise."""

from pathlib import Path

import pytest

from tests.support.expert_runs import assert_third_step_is_the_same, expert_models, resuming
from tests.support.parity import largest_difference, run_layouts, write_experiment

SP = "layout.tp=2,layout.sequence_parallel=true"
SAVE = "trainer.save_freq=1"
# Three steps each; a resumed run makes the third from what another one saved after the second.
SAVED = {"grouped": f"layout.ep=2,{SAVE}", "sequential": f"{SP},layout.ep=2,model.experts=sequential,{SAVE}"}
RESUMED = {
    "grouped-again": (f"layout.ep=2,{SAVE}", "grouped"),
    "sequential-again": (SAVED["sequential"], "sequential"),
    "grouped-as-sequential": ("layout.ep=2,model.experts=sequential", "grouped"),
    "grouped-at-etp2": (f"{SP},layout.etp=2", "grouped"),
    "grouped-at-pp2": ("layout.pp=2", "grouped"),
    "sequential-as-grouped": (f"{SP},layout.ep=2", "sequential"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    run_layouts(root, write_experiment(root, **expert_models(root)), 2, SAVED | resuming(root, RESUMED))
    return root


@pytest.mark.parametrize("kind", ["grouped", "sequential"])
def test_resumed_run_is_the_same_to_the_bit(folder: Path, kind: str) -> None:
    """Metrics of the third step, and the weights and optimizer state that were written after it."""
    saved = assert_third_step_is_the_same(folder / kind / "run", folder / f"{kind}-again" / "run")
    assert sum("exp_avg_sq" in key for key in saved) > 10


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", [name for name in RESUMED if not name.endswith("-again")])
def test_checkpoint_goes_on_where_experts_are_laid_out_otherwise(folder: Path, name: str, role: str) -> None:
    """Weights and optimizer state were resharded: the third step moves the weights as it did without a break."""
    _, source = RESUMED[name]
    ours, theirs = (folder / run / f"{role}-weights" for run in (name, source))
    worst = largest_difference(ours, theirs, origin=folder / role)
    assert worst.relative <= 1e-3, worst
