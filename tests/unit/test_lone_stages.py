"""`train FILE --stage NAME`: a stage alone starts where the stages that it builds on have left their models, or is
refused with the way out."""

import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from megappo.cli import main
from megappo.config.load import to_yaml
from megappo.config.requests import TrainRequest
from megappo.config.stages import read_stages
from megappo.errors import ExitCode
from megappo.observe.run_folder import RunFolder
from tests.support.experiments import make_checkpoint, write_experiment

CHAIN = """\
trainer: {{run_dir: {folder}/chain}}
stages:
  first: {{base: exp.yaml, trainer: {{kind: sft, total_steps: 2}}}}
  second: {{base: exp.yaml, model: {{path: "stage:first"}}, trainer: {{kind: sft}}}}
  third: {{base: exp.yaml, model: {{path: "stage:second"}}}}
"""


class Ranks:
    """Plays them: leaves a checkpoint, and the model `weights` where the run comes to its end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.weights, self.code = folder, "weights", ExitCode.DONE
        self.started: list[str] = []

    def __call__(self, request: TrainRequest, *_: object, **__: object) -> ExitCode:
        run = RunFolder(Path(request.config.trainer.run_dir))
        self.started.append(run.path.name)
        run.describe(to_yaml(request.config), {})
        if not run.checkpoints.exists():
            make_checkpoint(run.checkpoints, 1)
        export = run.hf / "step-000003"
        if self.code is ExitCode.DONE:
            shutil.copytree(self.folder / "model", export, dirs_exist_ok=True)
            (export / "model.safetensors").write_text(self.weights)
            if not (run.hf / "latest").exists():
                (run.hf / "latest").symlink_to(export.name)
        run.status("done" if self.code is ExitCode.DONE else "stopped", 1, int(self.code))
        return self.code


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ranks:
    write_experiment(tmp_path)
    (tmp_path / "chain.yaml").write_text(CHAIN.format(folder=tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    stand_in = Ranks(tmp_path)
    monkeypatch.setattr("megappo.cli.train.run_on_ranks", stand_in)
    return stand_in


Train = Callable[..., tuple[int, str]]


@pytest.fixture
def train(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> Train:
    """Exit code and standard error of `train` with more words: those of a stage, or of the chain."""

    def run(*words: str) -> tuple[int, str]:
        code = main.main(["train", str(ranks.folder / "chain.yaml"), *words])
        return code, capsys.readouterr().err

    return run


def test_each_stage_names_what_it_is_built_on(ranks: Ranks) -> None:
    stages, folder = read_stages(ranks.folder / "chain.yaml"), ranks.folder / "chain"
    assert [loaded.built_on for loaded in stages.values()] == [
        {}, {"first": f"{folder}/first/hf/latest"}, {"second": f"{folder}/second/hf/latest"}
    ]  # fmt: skip


def test_stages_one_by_one(ranks: Ranks, train: Train) -> None:
    for name in ("first", "second", "third"):
        assert train("--stage", name) == (0, "")
    assert ranks.started == ["first", "second", "third"]
    noted = json.loads((ranks.folder / "chain" / "third" / "built_on.json").read_text())
    # 7 bytes, and the CRC-32 of both ends of the file, which are the same 7.
    assert noted == {"second": {"model.safetensors": [7, zlib.crc32(b"weightsweights")]}}
    assert not (ranks.folder / "chain" / "first" / "built_on.json").exists()
    assert train("--resume") == (0, ""), "and the chain takes them for its own"


@pytest.mark.parametrize("left", ["nothing", "stopped", "running again", "no model"])
def test_a_stage_whose_model_is_missing_or_unfinished_is_not_started_from(
    ranks: Ranks, train: Train, left: str
) -> None:
    run = RunFolder(ranks.folder / "chain" / "first")
    ranks.code = ExitCode.STOPPED_AFTER_SAVING if left == "stopped" else ExitCode.DONE
    if left != "nothing":
        train("--stage", "first")
    if left == "running again":
        run.status("running", 1)
    if left == "no model":
        shutil.rmtree(run.hf)
    started = list(ranks.started)
    assert train("--stage", "second") == (
        2,
        f"error: stage first: {run.path} does not hold its finished run, from whose model stage second starts; train "
        "it first: --stage first, with --resume where it has stopped\n",
    )
    assert ranks.started == started and not (ranks.folder / "chain" / "second").exists()


def test_a_model_that_waits_for_its_name_is_started_from(ranks: Ranks, train: Train) -> None:
    train("--stage", "first")
    export = ranks.folder / "chain" / "first" / "hf" / "step-000003"
    old = export.rename(export.with_name("step-000003.old"))
    assert train("--stage", "second") == (0, "") and old.is_dir()


def test_a_stage_does_not_go_on_from_another_model_than_it_began_with(ranks: Ranks, train: Train) -> None:
    train("--stage", "first")
    ranks.code = ExitCode.STOPPED_AFTER_SAVING
    assert train("--stage", "second")[0] == 75
    assert train("--stage", "second", "--resume")[0] == 75
    ranks.code = ExitCode.DONE
    train("--stage", "first", "--resume")  # the same weights again
    assert train("--stage", "second", "--resume") == (0, "")
    ranks.weights = "others!"
    train("--stage", "first", "--resume")
    started, folder = list(ranks.started), ranks.folder / "chain"
    said = (
        f"error: stage second: {folder}/second was trained from another model than the one that stage first has in "
        f"{folder}/first/hf/latest by now; remove the former to train it anew, put the other model back, or delete "
        f"{folder}/second/built_on.json where the two are the same\n"
    )
    # Nor does the next stage start from what was trained so, nor the chain.
    for words in (("--stage", "second", "--resume"), ("--stage", "third"), ("--resume",)):
        assert train(*words) == (2, said)
    assert ranks.started == started
    # The way out, one and the other.
    ranks.weights = "weights"
    train("--stage", "first", "--resume")
    assert train("--stage", "third") == (0, "")
    ranks.weights = "others!"
    train("--stage", "first", "--resume")
    shutil.rmtree(folder / "second")
    assert train("--stage", "second") == (0, "")


def test_runs_of_earlier_versions_without_a_note_go_on(ranks: Ranks, train: Train) -> None:
    for name in ("first", "second"):
        train("--stage", name)
    note = ranks.folder / "chain" / "second" / "built_on.json"
    ranks.weights = "others!"
    train("--stage", "first", "--resume")
    for content in (None, "{", "[]"):
        note.unlink(missing_ok=True) if content is None else note.write_text(content)
        assert train("--stage", "second", "--resume") == (0, "")


def test_what_a_stage_was_built_on_may_be_gone_where_only_its_own_model_is_read(ranks: Ranks, train: Train) -> None:
    for name in ("first", "second"):
        train("--stage", name)
    shutil.rmtree(ranks.folder / "chain" / "first")
    assert train("--stage", "third") == (0, "")
