"""Virtual pipeline stages in whole runs: the one-rank numbers, checkpoints for other layouts, exports to the bit.

Their gradients and weights are compared in test_parity.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.parity import read_folder
from tests.support.ranks import run_ranks
from tests.support.runs import learning, succeed, write_run_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer

VIRTUAL = "layout.pp=2,layout.vpp=2"
SHORT = "trainer.total_steps=2,data.val_files=[],trainer.test_freq=0"
METRICS = ("actor/pg_loss", "critic/vf_loss", "actor/entropy", "actor/grad_norm", "critic/grad_norm", "kl/mean")


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("virtual")
    tiny_tokenizer(tiny_model(folder / "four", "llama", tied=True, num_layers=4))
    return write_run_experiment(folder)


def test_a_run_learns_as_one_rank_does_and_leaves_the_same_weights_everywhere(experiment: Path, tmp_path: Path) -> None:
    """It samples through the virtual stages itself; one rank reads its checkpoint; and what it exports are the bits."""
    model = experiment.parent / "four"
    words = ["train", experiment, f"model.path={model}", *SHORT.split(","), "trainer.export_hf=true"]
    succeed(*words, f"trainer.run_dir={tmp_path}/one", "trainer.save_last=false")
    succeed(*words, *VIRTUAL.split(","), f"trainer.run_dir={tmp_path}/virtual")
    succeed("convert", "--from", tmp_path / "virtual/checkpoints/latest", "--to", tmp_path / "converted")
    ours, one = learning(tmp_path / "virtual"), learning(tmp_path / "one")
    assert [line["step"] for line in ours] == [1, 2]
    for mine, theirs in zip(ours, one, strict=True):
        assert mine["response_length/mean"] == theirs["response_length/mean"]
        assert mine["rollout/log_prob_diff_max"] <= 1e-5
        for key in METRICS:
            assert mine[key] == pytest.approx(theirs[key], abs=2e-5), key
    exported, converted = read_folder(tmp_path / "virtual/hf/latest"), read_folder(tmp_path / "converted")
    before = read_folder(model)
    assert exported.keys() == converted.keys() == before.keys()
    assert all(torch.equal(exported[name], converted[name]) for name in exported)
    assert not any(torch.equal(exported[name], before[name]) for name in exported)


@pytest.fixture(scope="module")
def whole(experiment: Path) -> dict[str, Any]:
    """Metrics of runs that go on from each other's checkpoints."""
    folder = experiment.parent / "runs"
    common = f"model.path={experiment.parent / 'four'},{SHORT},trainer.save_last=false"

    def run(num_ranks: int, **runs: str) -> dict[str, Any]:
        words = [
            ",".join(filter(None, (f"{name}=trainer.run_dir={folder / name}", common, more)))
            for name, more in runs.items()
        ]
        found = run_ranks(
            "tests.distributed.programs.offload", "--config", experiment, "--runs", *words, nproc=num_ranks
        )
        return {name: result["metrics"] for name, result in found.items()}

    def after(name: str) -> str:
        return f"trainer.resume={folder / name}/checkpoints/step-000001"

    save, own = "trainer.save_freq=1", "rollout.tensor_model_parallel_size"
    found = run(1, one=save)
    found |= run(
        2, virtual=f"{VIRTUAL},{save}", moved=f"{VIRTUAL},{own}=1", moved_wide=f"{VIRTUAL},{own}=2",
        to_virtual=f"{VIRTUAL},{after('one')}", to_stages=f"layout.pp=2,{after('virtual')}",
    )  # fmt: skip
    return found | run(1, to_one=after("virtual"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["virtual", "moved", "moved_wide"])
def test_generation_through_virtual_stages_and_from_them(whole: dict[str, Any], name: str) -> None:
    assert whole[name][0]["hybrid/probe_diff_max"] <= 1e-5
    for ours, one in zip(whole[name], whole["one"], strict=True):
        assert ours["response_length/mean"] == one["response_length/mean"]
        assert ours["rollout/log_prob_diff_max"] <= 1e-5
        for key in METRICS:
            assert ours[key] == pytest.approx(one[key], abs=2e-5), key


@pytest.mark.slow
@pytest.mark.parametrize("name", ["to_virtual", "to_stages", "to_one"])
def test_checkpoints_go_on_in_other_layouts(whole: dict[str, Any], name: str) -> None:
    """Weights and optimizer state: the second step is that of the run which was not interrupted."""
    (ours,), one = whole[name], whole["one"][1]
    assert ours["step"] == 2
    for key in METRICS:
        assert ours[key] == pytest.approx(one[key], abs=2e-5), key
