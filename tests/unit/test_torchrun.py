"""launch/torchrun.py: ranks have the time that they are given after SIGTERM, with torchrun's option and without it."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import PContext

from tests.support.ranks import ROOT, rank_environment

PROGRAM = ROOT / "launch" / "torchrun.py"

# Rank 0 saves at once, rank 1 would need a minute.
RANK = """
import os, signal, sys, time
from pathlib import Path
folder, rank, stop = Path(sys.argv[1]), int(os.environ["RANK"]), []
signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
(folder / f"ready{rank}").touch()
while not stop:
    time.sleep(0.02)
time.sleep(60 if rank == 1 else 0.5)
(folder / f"saved{rank}").touch()
"""
# torch 2.11's agent, which names no time when it closes its ranks, in place of a later one.
LIKE_2_11 = f"""
import signal, sys
sys.path.insert(0, {str(PROGRAM.parent)!r})
import torchrun
def shutdown(self, death_sig=signal.SIGTERM, **later):
    if self._pcontext:
        self._pcontext.close(death_sig)
torchrun.LocalElasticAgent._shutdown = shutdown
torchrun.has_option = lambda: False
torchrun.main(int(sys.argv[1]), sys.argv[2:])
"""


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file as a module; what it replaces in torch is put back."""
    spec = importlib.util.spec_from_file_location("launch_torchrun", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(PContext, "close", PContext.close)
    return module


@pytest.mark.parametrize("agent", ["this torch's", "2.11's"])
def test_ranks_are_killed_once_the_time_is_over_and_not_before(tmp_path: Path, agent: str) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "like_2_11.py").write_text(LIKE_2_11)
    started = PROGRAM if agent == "this torch's" else tmp_path / "like_2_11.py"
    process = subprocess.Popen(
        [sys.executable, started, "3", "--standalone", "--nproc-per-node=2", tmp_path / "rank.py", tmp_path],
        cwd=tmp_path, env=rank_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    end = time.monotonic() + 60
    while not all((tmp_path / f"ready{rank}").exists() for rank in range(2)):
        assert process.poll() is None and time.monotonic() < end, "the ranks never started"
        time.sleep(0.05)
    begin = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=80)
    # 3 seconds and the agent's end; torchrun's own 30 would be over them.
    assert 3 <= time.monotonic() - begin < 25
    assert process.returncode == 1 and output.count("Unable to shutdown process") == 1
    assert [(tmp_path / f"saved{rank}").exists() for rank in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({}, "600 --nproc-per-node gpu --standalone"),
        (
            {"STOP_GRACE_SECONDS": "90", "NPROC": "4", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node-3"},
            "90 --nproc-per-node 4 --nnodes 2 --node-rank 1 --master-addr node-3 --master-port 29500",
        ),
    ],
)
def test_the_script_gives_ten_minutes_unless_told(tmp_path: Path, told: dict[str, str], words: str) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$*"\n')
    python.chmod(0o755)
    asked = subprocess.run(
        ["launch/torchrun.sh", "exp.yaml", "a.b=c"], cwd=ROOT, text=True, capture_output=True, check=True,
        env={"PATH": os.environ["PATH"], "PYTHON": str(python), **told},
    )  # fmt: skip
    program, _, given = asked.stdout.strip().partition(" ")
    assert Path(program).resolve() == PROGRAM and given == f"{words} -m megappo train exp.yaml a.b=c"


class Closed(PContext):
    """Notes how long it would wait; has no processes."""

    def __init__(self) -> None:
        self._tail_logs: list[Any] = []
        self.filtered_stdout = self.filtered_stderr = None
        self.waits: list[tuple[int, int]] = []

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        self.waits.append((death_sig, timeout))

    def _start(self) -> None: ...

    def _poll(self) -> None: ...

    def pids(self) -> dict[int, int]:
        return {}


def test_a_signal_is_waited_for_and_a_failed_rank_is_not(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", lambda self, death_sig: None)
    program.wait_for_saving(600)
    context = Closed()
    context.close(signal.SIGTERM)
    context.close()
    context.close(signal.SIGINT, 5)
    assert context.waits == [(signal.SIGTERM, 600), (signal.SIGTERM, 30), (signal.SIGINT, 5)]


def test_the_option_is_used_where_there_is_one(program: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(program.run, "main", given.append)
    monkeypatch.setattr(program, "wait_for_saving", lambda seconds: given.append([f"waits {seconds}"]))
    for is_there in (True, False):
        monkeypatch.setattr(program, "has_option", lambda is_there=is_there: is_there)
        program.main(600, ["-m", "megappo"])
    assert given == [["--shutdown-timeout", "600", "-m", "megappo"], ["waits 600"], ["-m", "megappo"]]


@pytest.mark.parametrize("gone", ["close", "_shutdown"])
def test_another_agent_is_refused(program: ModuleType, monkeypatch: pytest.MonkeyPatch, gone: str) -> None:
    """Neither the option nor what the patch is for: it says so, and doesn't leave the ranks 30 seconds."""
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", lambda self, death_sig: None)
    if gone == "close":
        monkeypatch.setattr(PContext, "close", lambda self, death_sig: None)
    else:
        monkeypatch.setattr(LocalElasticAgent, "_shutdown", lambda self, death_sig, timeout: None)
    with pytest.raises(SystemExit, match=r"no --shutdown-timeout.*; take torch 2\.11, or 2\.12 or later"):
        program.wait_for_saving(600)
