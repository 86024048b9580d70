"""A command with a time limit: its exit code, what it leaves running, and what is left when it is cut off."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.ranks import ROOT

TOOL = [sys.executable, str(ROOT / "tools" / "limited.py")]
# A child in a session of its own that outlives its parent, as a rank of torchrun does whose agent is killed.
PARENT = "setsid sleep 60 & echo $! > {file}; echo begun; sleep {lasts}"


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def limited(seconds: float, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TOOL, str(seconds), *command], capture_output=True, text=True, timeout=60)


def test_exit_codes() -> None:
    assert limited(30, "sh", "-c", "echo out; exit 3").returncode == 3
    assert limited(30, "sh", "-c", "kill -9 $$").returncode == 128 + signal.SIGKILL
    assert limited(0, "true").returncode == 2


@pytest.mark.parametrize(("limit", "lasts", "code"), [(30, 0, 0), (2, 60, 124)])
def test_nothing_is_left_running(tmp_path: Path, limit: float, lasts: float, code: int) -> None:
    ended = limited(limit, "sh", "-c", PARENT.format(file=tmp_path / "pid", lasts=lasts))
    assert ended.returncode == code and ended.stdout == "begun\n", ended.stderr
    assert ("cut off after 2 s" in ended.stderr) == (code == 124)
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_signal_ends_all(tmp_path: Path) -> None:
    program = PARENT.format(file=tmp_path / "pid", lasts=60)
    process = subprocess.Popen([*TOOL, "60", "sh", "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 143
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_a_command_has_time_to_tell_how_far_it_came() -> None:
    ended = limited(2, "sh", "-c", "trap 'echo step 3; exit 0' TERM; sleep 60 & wait")
    assert (ended.returncode, ended.stdout) == (124, "step 3\n")


# SIGTERM comes when the command runs already, and nobody holds its process yet.
INTERRUPTED = """
import pathlib, subprocess, sys, time
sys.path.insert(0, {tools!r})
import limited

start, file = subprocess.Popen, pathlib.Path({file!r})


def interrupted(*arguments, **settings):
    start(*arguments, **settings)
    while not file.exists() or not file.read_text():
        time.sleep(0.01)
    sys.exit(limited.TERMINATED)


subprocess.Popen = interrupted
limited.run(["sh", "-c", "echo $$ > {file}; exec sleep 60"])
"""


def test_a_signal_before_the_start_has_returned(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    program = INTERRUPTED.format(tools=str(ROOT / "tools"), file=str(file))
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 143
    assert not is_running(int(file.read_text()))
