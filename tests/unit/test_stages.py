"""Files of several stages: how settings are laid over each other, what a stage's model is, and where a run goes on."""
# ruff: noqa: E501  a line of a table is one case, with the whole message

import shutil
from pathlib import Path

import pytest

from megappo.cli import main
from megappo.cli.stages import Stages, is_done
from megappo.config.checks import check_experiment
from megappo.config.load import LoadedExperiment, load_experiment, to_yaml
from megappo.config.stages import has_stages, read_stage, read_stages
from megappo.errors import ConfigError, ExitCode
from megappo.observe.run_folder import RunFolder
from tests.support.experiments import make_checkpoint, write_experiment

CHAIN = """\
trainer: {{run_dir: {folder}/chain, seed: 7}}
stages:
  first: {{base: exp.yaml, trainer: {{kind: sft, total_steps: 2}}}}
  second:
    base: exp.yaml
    model: {{path: "stage:first"}}
    trainer: {{kind: dpo}}
  third:
    base: exp.yaml
    model: {{path: "stage:first"}}
    reward: {{parts: [{{name: dense, kind: implicit, policy: "stage:second"}}]}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_experiment(tmp_path)
    file = tmp_path / "chain.yaml"
    file.write_text(CHAIN.format(folder=tmp_path))
    return file


def test_a_stage_lies_over_the_file_and_this_over_the_stage_s_base(file: Path) -> None:
    stages = {name: stage.config for name, stage in read_stages(file).items()}
    assert list(stages) == ["first", "second", "third"]
    folder = file.parent
    assert [stage.trainer.run_dir for stage in stages.values()] == [f"{folder}/chain/{name}" for name in stages]
    # exp.yaml has 3 steps, and seed 0 by default.
    assert [stage.trainer.total_steps for stage in stages.values()] == [2, 3, 3]
    assert {stage.trainer.seed for stage in stages.values()} == {7}
    assert stages["first"].model.path == f"{folder}/model"
    assert stages["second"].model.path == stages["third"].model.path == f"{folder}/chain/first/hf/latest"
    part = stages["third"].reward
    assert part is not None and part.parts[0].policy == f"{folder}/chain/second/hf/latest"
    # What later stages start from is exported; nothing starts from the last.
    assert [stage.trainer.export_hf for stage in stages.values()] == [True, True, False]


def test_overrides_are_for_all_stages_or_for_one(file: Path) -> None:
    overrides = ["trainer.run_dir=elsewhere", "trainer.seed=3", "stages.second.trainer.seed=4"]
    stages = {name: stage.config.trainer for name, stage in read_stages(file, overrides).items()}
    assert {name: (stage.run_dir, stage.seed) for name, stage in stages.items()} == {
        "first": ("elsewhere/first", 3), "second": ("elsewhere/second", 4), "third": ("elsewhere/third", 3)
    }  # fmt: skip


def test_all_stages_are_checked_on_the_models_that_they_start_from(file: Path) -> None:
    for loaded in read_stages(file, as_planned=True).values():
        assert loaded.config.model.path == f"{file.parent}/model"
        assert check_experiment(loaded.config, 1) == []
    assert main.main(["validate", str(file)]) == 0
    with pytest.raises(ConfigError, match=r"layout\.tp: 5 \(command line\): does not divide"):
        Stages(str(file), ["stages.third.layout.tp=5"], None).run(lambda loaded: pytest.fail("nothing is started"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"stage:first"', '"stage:third"', r"model\.path: stage:third \(.*chain.yaml:6\): is no earlier stage's model; the earlier stages are first"),
        ("first:", "../first:", r"stages\.\.\./first .*: names a folder too"),
        ("base: exp.yaml, trainer", "base: none.yaml, trainer", r"stages\.first\.base: none\.yaml \(.*chain\.yaml:3\): .*none\.yaml does not exist"),
        ("kind: sft", "kind: sftt", r"trainer\.kind: \"sftt\" \(.*chain\.yaml:3\)"),
    ],
)  # fmt: skip
def test_mistakes_are_told_with_their_place(file: Path, old: str, new: str, message: str) -> None:
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=message):
        read_stages(file)


def test_a_stage_alone_has_to_be_named(file: Path) -> None:
    assert has_stages(file) and not has_stages(file.parent / "exp.yaml")
    assert read_stage(file, [], "second").config.trainer.kind == "dpo"
    with pytest.raises(ConfigError, match=r"has stages .first, second, third. and is no single experiment"):
        load_experiment(file)
    with pytest.raises(ConfigError, match="no such stage; its stages are first, second, third"):
        read_stage(file, [], "fourth")
    with pytest.raises(ConfigError, match="has no stages"):
        read_stage(file.parent / "exp.yaml", [], "first")
    with pytest.raises(ConfigError, match="no such stage; the stages are first"):
        read_stages(file, ["stages.fourth.trainer.seed=1"])


class Runs:
    """Plays the ranks: leaves what a run leaves, and ends with the given codes in turn."""

    def __init__(self, *codes: ExitCode) -> None:
        self.codes = list(codes)
        self.started: list[str] = []

    def __call__(self, loaded: LoadedExperiment) -> ExitCode:
        folder = RunFolder(Path(loaded.config.trainer.run_dir))
        self.started.append(folder.path.name)
        code = self.codes.pop(0)
        folder.describe(to_yaml(loaded.config), {})
        folder.status("done" if code is ExitCode.DONE else "stopped", 1, int(code))
        return code


def test_a_chain_goes_on_at_the_stage_where_it_stopped(file: Path) -> None:
    runs = Runs(ExitCode.DONE, ExitCode.STOPPED_AFTER_SAVING, ExitCode.DONE, ExitCode.DONE)
    chain, resumed = Stages(str(file), [], None), Stages(str(file), ["trainer.resume=auto"], None)
    assert chain.run(runs) is ExitCode.STOPPED_AFTER_SAVING
    with pytest.raises(ConfigError, match="holds a run already; go on at the stage where it stopped with --resume"):
        chain.run(runs)
    assert resumed.run(runs) is ExitCode.DONE
    assert runs.started == ["first", "second", "second", "third"]
    assert resumed.run(runs) is ExitCode.DONE  # all are done
    changed = Stages(str(file), ["trainer.resume=auto", "stages.first.trainer.seed=1"], None)
    with pytest.raises(ConfigError, match="a finished run of other settings"):
        changed.run(runs)
    assert is_done(read_stages(file, ["trainer.resume=auto"])["first"].config)


def test_a_run_from_the_model_of_a_stage_that_is_gone_is_refused(file: Path) -> None:
    """Here the third stage names the first and the second, and the second the first."""
    chain, folder = Stages(str(file), [], None, goes_on=True), file.parent / "chain"
    assert chain.run(Runs(*[ExitCode.DONE] * 3)) is ExitCode.DONE
    (folder / "second").rename(folder / "kept")
    expected = "{0}/second does not hold its finished run, and what is in {0}/third was trained from the model that it had left; remove"
    with pytest.raises(ConfigError, match="stage second: " + expected.format(folder)):
        chain.run(Runs())
    (folder / "kept").rename(folder / "second")
    shutil.rmtree(folder / "first")
    with pytest.raises(ConfigError, match=f"stage first: .* what is in {folder}/second, {folder}/third was trained"):
        chain.run(Runs())
    # The way out: what was built on it is trained anew too.
    shutil.rmtree(folder / "second")
    shutil.rmtree(folder / "third")
    runs = Runs(*[ExitCode.DONE] * 3)
    assert chain.run(runs) is ExitCode.DONE and runs.started == ["first", "second", "third"]


def test_a_stopped_run_from_a_model_that_is_gone_is_refused_too(file: Path) -> None:
    chain, folder = Stages(str(file), [], None, goes_on=True), file.parent / "chain"
    assert chain.run(Runs(ExitCode.DONE, ExitCode.STOPPED_AFTER_SAVING)) is ExitCode.STOPPED_AFTER_SAVING
    checkpoint = make_checkpoint(folder / "second" / "checkpoints", 1)
    shutil.rmtree(folder / "first")
    with pytest.raises(ConfigError, match=f"what is in {folder}/second was trained from the model that it had left"):
        chain.run(Runs())
    shutil.rmtree(checkpoint)  # it had not come far enough to hold anything of that model
    runs = Runs(*[ExitCode.DONE] * 3)
    assert chain.run(runs) is ExitCode.DONE and runs.started == ["first", "second", "third"]


def test_stages_that_name_no_lost_model_stay(file: Path) -> None:
    file.write_text(
        file.read_text().replace(
            '    model: {path: "stage:first"}\n    trainer: {kind: dpo}', "    trainer: {kind: dpo}"
        )
    )
    chain, folder = Stages(str(file), [], None, goes_on=True), file.parent / "chain"
    assert chain.run(Runs(ExitCode.DONE, ExitCode.DONE, ExitCode.STOPPED_AFTER_SAVING)) is ExitCode.STOPPED_AFTER_SAVING
    shutil.rmtree(folder / "first")
    runs = Runs(ExitCode.DONE, ExitCode.DONE)
    assert chain.run(runs) is ExitCode.DONE and runs.started == ["first", "third"]


@pytest.mark.parametrize("text", ["", '{"state": "do', "[]", "{}"])
def test_a_status_that_a_crash_has_cut_is_that_of_no_finished_run(file: Path, text: str) -> None:
    chain = Stages(str(file), [], None, goes_on=True)
    assert chain.run(Runs(ExitCode.DONE, ExitCode.STOPPED_AFTER_SAVING)) is ExitCode.STOPPED_AFTER_SAVING
    (file.parent / "chain" / "second" / "status.json").write_text(text)
    runs = Runs(ExitCode.DONE, ExitCode.DONE)
    assert chain.run(runs) is ExitCode.DONE and runs.started == ["second", "third"]


def test_ranks_from_outside_run_one_stage(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "x"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="start them once for each, with --stage NAME"):
        Stages(str(file), [], None).run(Runs())
