"""The local launcher and signals: ranks that save, deaf ones, and a launcher that is killed."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from megappo.errors import ExitCode
from tests.support.experiments import write_experiment
from tests.support.local_ranks import PRELUDE, run

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
