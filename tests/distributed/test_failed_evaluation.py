"""An evaluation that fails, for its judge is down, costs no step: the run goes on with the same numbers and marks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from megappo.errors import ExitCode
from tests.support.runs import (
    differing_metrics,
    learning,
    megappo,
    metrics,
    reward,
    status,
    succeed,
    write_run_experiment,
)

SETTINGS = [
    "layout.dp=2", "trainer.total_steps=4", "trainer.test_freq=2", "trainer.best_metric=eval/held_out/reward",
]  # fmt: skip


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_experiment(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def whole(experiment: Path) -> Path:
    run = experiment.parent / "whole"
    succeed("train", experiment, *SETTINGS, reward("spread"), "trainer.save_freq=2", f"trainer.run_dir={run}")
    return run


def state(run: Path, step: int) -> dict[str, Any]:
    """What a checkpoint and the note of the evaluation after it say."""
    checkpoint = run / "checkpoints" / f"step-{step:06d}"
    files = [checkpoint / name for name in ("trainer.json", "evaluation.json")]
    saved, noted = (json.loads(file.read_text()) if file.exists() else {} for file in files)
    return saved | noted


def test_the_best_is_the_highest(whole: Path) -> None:
    scores = {int(line["step"]): line["eval/held_out/reward"] for line in learning(whole) if line["step"] in (2, 4)}
    assert all(len(line) > 40 for line in learning(whole)), "the comparisons have lost their contents"
    best = max(scores, key=lambda step: (scores[step], -step))
    assert (whole / "checkpoints" / "best").resolve().name == f"step-{best:06d}"
    mark = {"metric": "eval/held_out/reward", "mode": "max"}
    assert state(whole, 2)["best"] == mark | {"value": scores[2], "step": 2}
    assert state(whole, 4)["best"] == mark | {"value": scores[best], "step": best}


def test_the_due_checkpoint_is_there_and_the_evaluation_is_made_up_for(experiment: Path, whole: Path) -> None:
    run = experiment.parent / "parts"
    words = ["train", experiment, *SETTINGS, "trainer.save_freq=2", f"trainer.run_dir={run}", "--resume"]
    failed = megappo(*words, reward("spread_of_training"))
    assert failed.code == ExitCode.BAD_INPUT and "the judge is down" in failed.err
    assert [line["step"] for line in metrics(run)] == [1] and status(run)["state"] == "failed"
    assert state(run, 2)["step"] == 2 and state(run, 2)["best"] is None
    assert not (run / "checkpoints" / "best").exists()
    # Still down: nothing is lost, and nothing is told of the step.
    failed = megappo(*words, reward("spread_of_training"))
    assert failed.code == ExitCode.BAD_INPUT and [line["step"] for line in metrics(run)] == [1]

    succeed(*words, reward("spread"))
    assert differing_metrics(run, whole) == {1: [], 2: [], 3: [], 4: []}
    assert state(run, 4)["best"] == state(whole, 4)["best"]
    assert (run / "checkpoints" / "best").resolve().name == (whole / "checkpoints" / "best").resolve().name


@pytest.mark.slow
def test_the_last_checkpoint_is_there_too(experiment: Path, whole: Path) -> None:
    """Its evaluation is due whatever `test_freq` says, and the checkpoint by `save_last`. Another run goes on from it,
    and marks a checkpoint of its own."""
    run, other = experiment.parent / "last", experiment.parent / "other"
    words = ["train", experiment, *SETTINGS, "trainer.total_steps=2", "trainer.test_freq=0"]
    failed = megappo(*words, f"trainer.run_dir={run}", reward("spread_of_training"))
    assert failed.code == ExitCode.BAD_INPUT and state(run, 2)["step"] == 2

    named = f"trainer.resume={run}/checkpoints/step-000002"
    succeed("train", experiment, *SETTINGS, f"trainer.run_dir={other}", named, reward("spread"))
    assert differing_metrics(other, whole) == {2: [], 3: [], 4: []}
    assert state(other, 4)["best"] == state(whole, 4)["best"]
    for name in ("step-000002", "best"):
        assert (other / "checkpoints" / name / "manifest.json").is_file()


def test_an_evaluation_that_is_done_is_not_repeated(experiment: Path, whole: Path) -> None:
    run, named = experiment.parent / "later", f"trainer.resume={whole}/checkpoints/step-000002"
    succeed("train", experiment, *SETTINGS, f"trainer.run_dir={run}", named, reward("spread"))
    assert differing_metrics(run, whole) == {3: [], 4: []}
    assert state(run, 4)["best"] == state(whole, 4)["best"]


def test_an_evaluation_whose_note_a_crash_has_cut_is_made_again(experiment: Path, whole: Path) -> None:
    run, saved = experiment.parent / "after-crash", experiment.parent / "cut" / "step-000002"
    shutil.copytree(whole / "checkpoints" / "step-000002", saved)
    (saved / "evaluation.json").write_text('{"best": {"met')
    succeed("train", experiment, *SETTINGS, f"trainer.run_dir={run}", f"trainer.resume={saved}", reward("spread"))
    assert differing_metrics(run, whole) == {2: [], 3: [], 4: []}
    assert state(run, 4)["best"] == state(whole, 4)["best"]
