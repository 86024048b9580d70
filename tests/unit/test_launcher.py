"""The local launcher with tiny programs as ranks: success, first failure, signals, killed ranks, orphans."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megappo.config.layout import LayoutConfig
from megappo.config.requests import ConvertRequest, EvaluateRequest, GenerateRequest, TrainRequest, layout_options
from megappo.errors import ConfigError, ExitCode
from megappo.launcher.failure import FAILURE_DIR, Failure
from megappo.launcher.local import RankProgram, run_local
from megappo.launcher.rank import report_failure
from megappo.observe.run_folder import RunFolder
from tests.support.experiments import small_experiment, write_experiment

# Each program may use `rank`, and ends as it likes.
PRELUDE = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
"""


def fake(body: str) -> tuple[str, ...]:
    return (sys.executable, "-c", PRELUDE + body)


def run(body: str, num_ranks: int = 3, **settings: object) -> tuple[ExitCode, float]:
    begin = time.monotonic()
    code = run_local(RankProgram(fake(body), num_ranks, **settings))  # type: ignore[arg-type]
    return code, time.monotonic() - begin


def test_ranks_get_their_place_in_the_world(tmp_path: Path) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    body = f"""
import json
Path(r"{tmp_path}", str(rank)).write_text(json.dumps({{name: os.environ[name] for name in {names!r}}}))
print("hello", rank)
"""
    code, _ = run(body, 2, environment={"OMP_NUM_THREADS": "1"}, log_folder=tmp_path / "logs")
    assert code is ExitCode.DONE
    first, second = (json.loads((tmp_path / str(rank)).read_text()) for rank in (0, 1))
    assert first | {"RANK": "1", "LOCAL_RANK": "1"} == second
    assert (first["WORLD_SIZE"], first["MASTER_ADDR"], first["OMP_NUM_THREADS"]) == ("2", "127.0.0.1", "1")
    assert (tmp_path / "logs" / "rank-00001.out").read_text() == "hello 1\n"


def test_nobody_can_take_the_port_before_rank_0_has_started(tmp_path: Path) -> None:
    body = f"""
import socket
seen = Path(r"{tmp_path}", "seen")
if rank == 1:  # rank 0 is not there yet
    with socket.socket() as other, socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"]))):
        try:
            other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
        except OSError as error:
            seen.write_text(str(error))
while not seen.exists():
    time.sleep(0.02)
from datetime import timedelta
from megappo.parallel.meeting import meeting_store
store = meeting_store(timedelta(seconds=60))
store.set(f"rank {{rank}}", str(rank))
Path(r"{tmp_path}", str(rank)).write_text(" ".join(store.get(f"rank {{other}}").decode() for other in range(3)))
store.add("written", 1)
while store.add("written", 0) < 3:  # the store ends with rank 0
    time.sleep(0.02)
time.sleep(0.5 if rank == 0 else 0)
"""
    assert run(body, 3)[0] is ExitCode.DONE
    assert "in use" in (tmp_path / "seen").read_text()
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["0 1 2"] * 3


CLAIM = """
from megappo.launcher.failure import *
from megappo.errors import *
def wait_until(condition):
    while not condition():
        time.sleep(0.02)
def fail(error):
    failure = Failure.of(error, rank)
    claim_failure(Path(os.environ[FAILURE_DIR]), failure)
    os._exit(failure.exit_code)
"""


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


def test_a_signal_after_the_last_step_kills_no_rank(tmp_path: Path) -> None:
    """While Python ends it gives signals that had a handler their deadly default back."""
    file = write_experiment(tmp_path)
    body = f"""
from megappo.config.load import load_experiment
from megappo.config.requests import TrainRequest
from megappo.launcher import rank as program
def dispatch(request, at_end):
    signal.signal(signal.SIGTERM, lambda *_: None)  # as the trainer's, which remembers it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    return 0
program._dispatch = dispatch
program.run_rank(TrainRequest(config=load_experiment({str(file)!r}, [])))
ended = [signal.getsignal(number) for number in program.STOP_SIGNALS]
Path(r"{tmp_path}", "ended").write_text(str(ended == [signal.SIG_IGN] * 2))
"""
    assert run(body, num_ranks=1)[0] is ExitCode.DONE
    assert (tmp_path / "ended").read_text() == "True"


def test_stopped_after_saving() -> None:
    assert run("sys.exit(75)")[0] is ExitCode.STOPPED_AFTER_SAVING


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


# A launcher of its own process, for signals: argv is the ranks' program, number of ranks, grace.
LAUNCHER = """
import sys
from megappo.launcher.local import RankProgram, run_local
command = (sys.executable, "-c", sys.argv[1])
print("started", flush=True)
sys.exit(run_local(RankProgram(command, int(sys.argv[2]), stop_grace_seconds=float(sys.argv[3]),
                               if_interrupted=lambda: "the last checkpoint is step-000005")))
"""


def launch(tmp_path: Path, body: str, grace: float = 60.0) -> tuple[subprocess.Popen[str], Callable[[str], None]]:
    """Starts two ranks that touch `ready<rank>` and run `body`; returns the launcher once both are ready."""
    ready = f'Path(r"{tmp_path}", f"ready{{rank}}").write_text(str(os.getpid()))\n'
    program = PRELUDE + body.replace("READY", ready)
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, program, "2", str(grace)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def wait_for(name: str) -> None:
        end = time.monotonic() + 20
        while not all((tmp_path / f"{name}{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < end and process.poll() is None, f"{name} was never written"
            time.sleep(0.02)

    wait_for("ready")
    return process, wait_for


SAVE_ON_TERM = """
stop = False
def remember(number, frame):
    global stop
    stop = True
signal.signal(signal.SIGTERM, remember)
READY
while not stop:
    time.sleep(0.02)
time.sleep(0.5)  # finishes the step and saves
Path(r"{folder}", f"saved{{rank}}").touch()
sys.exit(75)
"""


def test_sigterm_lets_the_ranks_save(tmp_path: Path) -> None:
    process, _ = launch(tmp_path, SAVE_ON_TERM.replace("{folder}", str(tmp_path)).replace("{{rank}}", "{rank}"))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (ExitCode.STOPPED_AFTER_SAVING, "")
    assert (tmp_path / "saved0").exists() and (tmp_path / "saved1").exists()


DEAF = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
READY
time.sleep(60)
"""


def test_grace_after_sigterm_ends(tmp_path: Path) -> None:
    process, _ = launch(tmp_path, DEAF, grace=0.3)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=10)
    assert process.returncode == ExitCode.FAILED
    assert err == "rank 0, 1 had not saved in time after the signal and was ended; raise trainer.stop_grace_seconds\n"


def test_ctrl_c_ends_even_deaf_ranks_within_10_seconds(tmp_path: Path) -> None:
    process, _ = launch(tmp_path, DEAF)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - begin < 10
    assert (process.returncode, err) == (ExitCode.FAILED, "interrupted; the last checkpoint is step-000005\n")
    for rank in (0, 1):
        assert not psutil.pid_exists(int((tmp_path / f"ready{rank}").read_text()))


def test_ranks_die_with_the_launcher(tmp_path: Path) -> None:
    body = """
from megappo.launcher.rank import die_with_launcher
die_with_launcher()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
READY
time.sleep(60)
"""
    process, _ = launch(tmp_path, body)
    ranks = [int((tmp_path / f"ready{rank}").read_text()) for rank in (0, 1)]
    process.kill()
    process.communicate(timeout=10)
    end = time.monotonic() + 5
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in ranks):
        assert time.monotonic() < end, "the ranks outlived their launcher"
        time.sleep(0.05)


def test_what_a_rank_started_is_ended_with_it(tmp_path: Path) -> None:
    body = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
Path(r"{tmp_path}", str(rank)).write_text(str(child.pid))
os._exit(0)
"""
    assert run(body, 1)[0] is ExitCode.DONE
    child = int((tmp_path / "0").read_text())
    end = time.monotonic() + 5  # the kernel takes its time where all cores are busy
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end, "what the rank started outlived it"
        time.sleep(0.02)


def test_program_that_does_not_exist() -> None:
    with pytest.raises(FileNotFoundError):
        run_local(RankProgram(("/nowhere/python",), 2))


def test_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from megappo.config.layout import LayoutConfig
    from megappo.launcher.world import count_gpus, local_world_size

    assert local_world_size(LayoutConfig(tp=2), None, num_gpus=0) == 2
    assert local_world_size(LayoutConfig(tp=2, dp=2), None, num_gpus=0) == 4
    assert local_world_size(LayoutConfig(tp=2), None, num_gpus=8) == 8
    assert local_world_size(LayoutConfig(tp=2), 4, num_gpus=8) == 4
    assert local_world_size(LayoutConfig(pp=2, ep=4), None, num_gpus=0) == 8
    assert local_world_size(LayoutConfig(tp=4, ep=2), None, num_gpus=0) == 4
    assert local_world_size(LayoutConfig(tp=4, ep=2, etp=4), None, num_gpus=0) == 8
    assert local_world_size(LayoutConfig(ep=2), None, num_gpus=8) == 8
    with pytest.raises(ConfigError, match="layout tp 2 · pp 1 · dp 4: needs 8 ranks, and this machine has 4 GPUs"):
        local_world_size(LayoutConfig(tp=2, dp=4), None, num_gpus=4)
    for visible, count in (("", 0), ("0", 1), ("0,3", 2), ("0,-1,2", 1), ("-1", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert count_gpus() == count


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
