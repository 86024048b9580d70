"""What the local launcher tells of a failure: the first one, mistakes of the user, killed ranks."""

import json
import os
from pathlib import Path

import pytest

from megappo.config.layout import LayoutConfig
from megappo.config.requests import ConvertRequest, EvaluateRequest, GenerateRequest, TrainRequest, layout_options
from megappo.errors import ConfigError, ExitCode
from megappo.launcher.failure import FAILURE_DIR, Failure
from megappo.launcher.rank import report_failure
from megappo.observe.run_folder import RunFolder
from tests.support.experiments import small_experiment, write_experiment
from tests.support.local_ranks import CLAIM, run


def test_first_failure_is_shown_and_the_others_are_ended(capfd: pytest.CaptureFixture[str]) -> None:
    body = (
        CLAIM
        + """
if rank == 1:
    try:
        raise ValueError("the cause")
    except ValueError as error:
        fail(error)
if rank == 0:
    wait_until(lambda: read_failure(Path(os.environ[FAILURE_DIR])) is not None)
    fail(RuntimeError("peer closed the connection"))
time.sleep(60)  # hangs in a collective
"""
    )
    code, seconds = run(body)
    err = capfd.readouterr().err
    assert code is ExitCode.FAILED and seconds < 10
    assert err.startswith("rank 1 failed:\nTraceback") and err.rstrip().endswith("ValueError: the cause")
    assert "peer closed" not in err


def test_mistake_of_the_user_is_one_line_and_exit_2(capfd: pytest.CaptureFixture[str]) -> None:
    code, _ = run(CLAIM + 'fail(DataError("train.jsonl:3: is not JSON; remove the line"))')
    assert code is ExitCode.BAD_INPUT
    assert capfd.readouterr().err == "error: train.jsonl:3: is not JSON; remove the line\n"


def test_layout_is_named_as_it_was_typed(tmp_path: Path) -> None:
    """A mistake that a rank finds: options of `convert` and `generate`, of `evaluate` where they were typed."""
    layout = LayoutConfig(tp=3)
    config = small_experiment(tmp_path)
    error = ConfigError("layout.tp: 3 does not divide the rows; set layout.tp=2, or layout.vpp")
    as_options = "--tp 3 does not divide the rows; set --tp=2, or layout.vpp"
    for request, expected in (
        (ConvertRequest(source="a", target="b", layout=layout), as_options),
        (GenerateRequest(model="a", prompts=("b",), layout=layout), as_options),
        (EvaluateRequest(config=config, layout_options=("tp",)), as_options),
        (EvaluateRequest(config=config, layout_options=("pp",)), str(error)),
        (TrainRequest(config=config), str(error)),
    ):
        assert Failure.of(error, 0, layout_options(request)).text == f"error: {expected}"


def test_failure_that_is_no_exception_is_told_too(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """torch's CheckpointException derives from BaseException."""
    request = ConvertRequest(source="a", target=str(tmp_path / "b")).model_dump_json()
    body = f"""
from megappo.config.requests import ConvertRequest
from megappo.launcher import rank
def damaged(request, at_end):
    raise BaseException("a damaged checkpoint")
rank._dispatch = damaged
rank.run_rank(ConvertRequest.model_validate_json({request!r}))
"""
    code, _ = run(body, num_ranks=1)
    told = capfd.readouterr().err
    assert code == ExitCode.FAILED and "a damaged checkpoint" in told and "gave no reason" not in told


def test_engines_are_closed_once_the_failure_is_told(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Also where closing fails too; closing that waits for peers that are gone is left after two seconds."""
    request = ConvertRequest(source="a", target=str(tmp_path / "b")).model_dump_json()
    body = f"""
from megappo.config.requests import ConvertRequest
from megappo.launcher import rank as program
from megappo.launcher.failure import *
def close():
    told = read_failure(Path(os.environ[FAILURE_DIR]))
    Path(r"{tmp_path}", f"closed-{{rank}}").write_text(told.message)
    if rank == 0:
        raise RuntimeError("closing failed")
    time.sleep(60)
def dispatch(request, at_end):
    at_end.callback(close)
    # A rank that still starts when the other one fails is ended there.
    Path(r"{tmp_path}", f"here-{{rank}}").touch()
    while not all(Path(r"{tmp_path}", f"here-{{each}}").exists() for each in range(2)):
        time.sleep(0.02)
    raise ValueError("the cause")
program._dispatch = dispatch
program.run_rank(ConvertRequest.model_validate_json({request!r}))
"""
    code, seconds = run(body, num_ranks=2)
    told = capfd.readouterr().err
    assert code == ExitCode.FAILED and told.count("Traceback") == 1 and "the cause" in told
    assert [(tmp_path / f"closed-{rank}").read_text() for rank in range(2)] == ["the cause"] * 2
    assert seconds < 30


TRAINING = """
from megappo.config.load import load_experiment
from megappo.config.requests import TrainRequest
from megappo.errors import DataError
from megappo.launcher import rank as program
from megappo.observe.run_folder import RunFolder
config = load_experiment({file!r}, ["trainer.run_dir={folder}"])
folder = RunFolder(Path(r"{folder}"))
program._dispatch = lambda request, at_end: dispatch(at_end)
program.run_rank(TrainRequest(config=config))
"""


def test_a_mistake_stays_one_where_the_status_cannot_be_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = f"""
def dispatch(at_end):
    at_end.callback(Path(r"{tmp_path}", "closed").touch)
    folder.path.touch()  # a file where the folder of the run should be
    raise DataError("train.jsonl:3: is not JSON")
"""
    training = TRAINING.format(file=str(write_experiment(tmp_path)), folder=tmp_path / "run")
    code, _ = run(body + training, num_ranks=1)
    told = capfd.readouterr().err
    assert code is ExitCode.BAD_INPUT and (tmp_path / "closed").exists()
    assert told.endswith("error: train.jsonl:3: is not JSON\n") and "Traceback" not in told
    assert "run/status.json: cannot be marked as failed: " in told


def test_a_failure_of_an_earlier_attempt_is_over_when_rank_0_begins(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    RunFolder(run_dir).status("running", 4)
    RunFolder(run_dir).failed(1)
    body = f"""
while rank == 1 and "failed" in Path(r"{run_dir}", "status.json").read_text():
    time.sleep(0.02)
def dispatch(at_end):
    if rank == 1:
        raise DataError("of this attempt")
    while "failed" not in Path(r"{run_dir}", "status.json").read_text():
        time.sleep(0.02)
    folder.status("running", 5)  # late
    return 0
"""
    assert run(body + TRAINING.format(file=str(write_experiment(tmp_path)), folder=run_dir), 2)[0] is ExitCode.BAD_INPUT
    status = json.loads((run_dir / "status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"]) == ("failed", 4, 2)


def test_failure_that_cannot_be_claimed_is_told_by_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(FAILURE_DIR, str(tmp_path / "file" / "claims"))
    assert report_failure(Failure.of(ConfigError("the cause"), 0))
    assert capfd.readouterr().err == "error: the cause\n"


def test_killed_rank_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = (
        CLAIM
        + f"""
import psutil
pid = Path(r"{tmp_path}", "pid")
if rank == 2:
    pid.with_suffix(".new").write_text(str(os.getpid()))
    pid.with_suffix(".new").rename(pid)
    os.kill(os.getpid(), signal.SIGKILL)
wait_until(pid.exists)
victim = int(pid.read_text())
def is_dead():
    try:
        return psutil.Process(victim).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
wait_until(is_dead)
fail(RuntimeError("peer closed the connection"))
"""
    )
    code, _ = run(body)
    assert code is ExitCode.FAILED
    err = capfd.readouterr().err
    assert err.startswith("rank 2 was killed by SIGKILL; the system does that when memory runs out")
    assert "peer closed" not in err


def test_crash_shows_the_end_of_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    body = """
if rank == 1:
    print("about to divide", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
"""
    assert run(body, 2)[0] is ExitCode.FAILED
    err = capfd.readouterr().err
    assert err == "rank 1 was killed by SIGSEGV; it crashed outside Python; the last it wrote:\nabout to divide\n"


def test_rank_that_gives_no_reason(capfd: pytest.CaptureFixture[str]) -> None:
    assert run("sys.exit(3 if rank == 1 else 0)", 2)[0] is ExitCode.DOES_NOT_FIT
    assert capfd.readouterr().err == "rank 1 ended with exit code 3 and gave no reason\n"


def test_failure_folder_of_ranks_that_others_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from megappo.launcher.environment import failure_folder
    from megappo.launcher.failure import FAILURE_DIR

    monkeypatch.delenv(FAILURE_DIR, raising=False)
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a/b")
    first = failure_folder()
    assert "29500" in first.name and "a_b" in first.name and str(os.getppid()) in first.name
    monkeypatch.setenv("MASTER_PORT", "29501")
    assert failure_folder() != first
    monkeypatch.setenv(FAILURE_DIR, str(tmp_path))
    assert failure_folder() == tmp_path
