"""The small files of a run's folder, and which checkpoint a run goes on from."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from megappo.config.checkpoint_folder import (
    checkpoint_to_resume,
    complete_checkpoints,
    going_on,
    latest_checkpoint,
    read_state,
)
from megappo.config.requests import ConvertRequest, TrainRequest
from megappo.errors import ConfigError, DataError, ExitCode
from megappo.launcher.run_status import record_end
from megappo.observe import environment
from megappo.observe.environment import describe_environment
from megappo.observe.run_folder import RunFolder
from tests.support.experiments import MODEL, make_checkpoint, small_experiment


def status_of(folder: RunFolder) -> tuple[str, int, int | None]:
    content = json.loads((folder.path / "status.json").read_text())
    return content["state"], content["step"], content["exit_code"]


def test_status_is_replaced_and_a_failure_keeps_the_step(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "a")
    folder.failed(2)
    assert status_of(folder) == ("failed", 0, 2)
    folder.begin()
    folder.status("running", 7)
    assert status_of(folder) == ("running", 7, None)
    folder.failed(1)
    assert status_of(folder) == ("failed", 7, 1)
    assert [path.name for path in folder.path.iterdir()] == ["status.json"]


def test_a_failure_is_not_undone_by_what_the_writing_rank_says_later(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a")
    folder.begin()
    assert not folder.path.exists(), "a run that is refused leaves nothing"
    folder.status("running", 5)
    folder.failed(2)
    for state in ("running", "done"):
        folder.status(state, 6)
        assert status_of(folder) == ("failed", 5, 2)
    folder.begin()
    assert status_of(folder) == ("running", 5, None)
    folder.status("done", 8, 0)
    folder.begin()
    assert status_of(folder) == ("done", 8, 0), "as it was left, until the run has started"


def test_status_that_a_crash_has_cut_counts_as_none(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for content in ("", '{"state": "run', "[]", "{}"):
        (tmp_path / "status.json").write_text(content)
        folder.begin()
        folder.failed(1)
        assert status_of(folder) == ("failed", 0, 1)


def test_nodes_that_fail_at_once_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another node writes all of its file between the two halves of this one's writing."""
    folder, replace, codes = RunFolder(tmp_path), os.replace, [3]

    def held_up(source: Path, target: Path) -> None:
        if codes:
            folder.failed(codes.pop())
            assert status_of(folder) == ("failed", 0, 3)
        replace(source, target)

    monkeypatch.setattr(os, "replace", held_up)
    folder.failed(2)
    assert status_of(folder) == ("failed", 0, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_end_that_cannot_be_recorded_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "runs").write_text("a file where the folder of runs should be")
    record_end(TrainRequest(config=small_experiment(tmp_path)), ExitCode.BAD_INPUT)
    (told,) = caplog.messages
    assert told.startswith(f"{tmp_path}/runs/test/status.json: cannot be marked as failed: ")


def test_end_of_a_request_is_recorded_where_a_run_failed(tmp_path: Path) -> None:
    request = TrainRequest(config=small_experiment(tmp_path))
    folder = RunFolder(tmp_path / "runs" / "test")
    folder.status("stopped", 5, 75)
    for code in (ExitCode.DONE, ExitCode.STOPPED_AFTER_SAVING):
        record_end(request, code)
        assert status_of(folder) == ("stopped", 5, 75)
    record_end(request, ExitCode.FAILED)
    assert status_of(folder) == ("failed", 5, 1)
    record_end(ConvertRequest(source="a", target=str(tmp_path / "b")), ExitCode.FAILED)
    assert not (tmp_path / "b").exists()


def test_events_and_samples(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.event(3, "checkpoint", path="a")
    folder.event(3, "stopped", reason="übung")
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(event["step"], event["event"]) for event in events] == [(3, "checkpoint"), (3, "stopped")]
    assert events[1]["reason"] == "übung"
    file = folder.samples(10, [{"prompt": "1+1=", "score": 1.0}, {"prompt": "ü\n", "score": 0.0}])
    assert file == tmp_path / "samples" / "step-000010.jsonl"
    assert [json.loads(line)["prompt"] for line in file.read_text(encoding="utf-8").split("\n")[:-1]] == ["1+1=", "ü\n"]


def test_environment_holds_the_versions(tmp_path: Path) -> None:
    found = describe_environment(world_size=4, kernels={"norm": "megappo.RMSNorm"})
    assert found["world_size"] == 4 and found["python"] == sys.version.split()[0] and found["cpus"] == os.cpu_count()
    assert found["packages"]["torch"] == metadata.version("torch")
    root = Path(__file__).resolve().parents[2]
    if (root / ".git").exists():
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True)
        assert found["commit"] == head.stdout.strip()
    RunFolder(tmp_path / "run").describe("model: {}\n", found)
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["world_size"] == 4
    assert (tmp_path / "run" / "config.yaml").read_text() == "model: {}\n"


def test_environment_without_git_and_with_a_package_removed_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two folders without METADATA, one with a name and no version, and none of the programs on the path."""
    for name in ("gone-1.0.dist-info", "gone_too-2.0.dist-info", "nameless-3.0.dist-info"):
        (tmp_path / "site" / name).mkdir(parents=True)
    (tmp_path / "site" / "nameless-3.0.dist-info" / "METADATA").write_text("Name: nameless\n")
    (tmp_path / "project" / ".git").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(environment, "__file__", str(tmp_path / "project" / "megappo" / "observe" / "environment.py"))
    monkeypatch.setenv("PATH", str(tmp_path / "no-programs"))
    found = describe_environment(world_size=1, kernels={})
    assert found["commit"] is None
    assert found["packages"]["torch"] == metadata.version("torch")
    assert "gone" not in found["packages"] and None not in found["packages"]
    assert json.loads(json.dumps(found["packages"])) == found["packages"]


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    third, fifth = make_checkpoint(tmp_path, 3), make_checkpoint(tmp_path, 5)
    (tmp_path / "step-000007.partial").mkdir()
    (tmp_path / "step-000007.partial" / "manifest.json").write_text("{}")
    (tmp_path / "step-000009").mkdir()
    assert complete_checkpoints(tmp_path) == [third, fifth]
    assert latest_checkpoint(tmp_path) == fifth, "a crash came between the checkpoint and its pointer"
    (tmp_path / "latest").symlink_to("step-000003")
    assert latest_checkpoint(tmp_path) == third, "the pointer was turned back"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("step-000009")
    assert latest_checkpoint(tmp_path) == fifth, "the pointer hangs in the air"


def test_what_was_written_last_is_newest_whatever_its_step(tmp_path: Path) -> None:
    """A run that went back to step 3 and saved step 4 must not lose that to `max_checkpoints`."""
    ninth = make_checkpoint(tmp_path, 9)
    fourth = make_checkpoint(tmp_path, 4)
    os.utime(fourth / "manifest.json", (2000, 2000))
    assert complete_checkpoints(tmp_path) == [ninth, fourth]


def test_checkpoint_that_a_run_goes_on_from(tmp_path: Path) -> None:
    assert checkpoint_to_resume(small_experiment(tmp_path)) is None
    assert checkpoint_to_resume(small_experiment(tmp_path, "trainer.resume=auto")) is None
    path = make_checkpoint(tmp_path / "runs" / "test" / "checkpoints", 5)
    assert checkpoint_to_resume(small_experiment(tmp_path, "trainer.resume=auto")) == path
    assert checkpoint_to_resume(small_experiment(tmp_path, f"trainer.resume={path}")) == path
    with pytest.raises(ConfigError, match=r"holds the checkpoint step-000005; go on from it with trainer.resume=auto"):
        checkpoint_to_resume(small_experiment(tmp_path))
    other = make_checkpoint(tmp_path / "elsewhere", 5, num_layers=MODEL["num_hidden_layers"] + 1)  # type: ignore[operator]
    with pytest.raises(DataError, match=r"a checkpoint of another model .num_layers 7 there, 6 in"):
        checkpoint_to_resume(small_experiment(tmp_path, f"trainer.resume={other}"))


def test_resume_prefers_the_run_s_own_checkpoint_to_a_named_one(tmp_path: Path) -> None:
    def resume(*overrides: str) -> str:
        return going_on(small_experiment(tmp_path, *overrides)).trainer.resume

    other = make_checkpoint(tmp_path / "elsewhere", 9)
    named = f"trainer.resume={other}"
    assert [resume(), resume("trainer.resume=auto"), resume(named)] == ["auto", "auto", str(other)]
    own = make_checkpoint(tmp_path / "runs" / "test" / "checkpoints", 5)
    assert [resume(), resume("trainer.resume=auto"), resume(named)] == ["auto", "auto", "auto"]
    assert checkpoint_to_resume(going_on(small_experiment(tmp_path, named))) == own


def test_damaged_descriptions_are_named(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 5)
    content = (path / "trainer.json").read_bytes()
    for damage in (b"\xff" + content[1:], content[:-3], b"[]"):
        (path / "trainer.json").write_bytes(damage)
        with pytest.raises(DataError, match=r"step-000005: the file trainer.json is damaged; resume from another"):
            read_state(path)
    (path / "trainer.json").unlink()
    with pytest.raises(DataError, match=r"the file trainer.json is missing"):
        read_state(path)
    (path / "manifest.json").unlink()
    with pytest.raises(DataError, match=r"not a complete checkpoint .no manifest.json"):
        read_state(path)
