"""Ranks on this machine: started, watched and ended together. What is said about their end is in `outcome.py`.

Signals: SIGTERM (or SIGUSR1) lets the ranks finish their step and save; Ctrl-C ends them within 10 s without saving.
Each rank leads a session of its own, so that the terminal's Ctrl-C reaches the launcher alone and is handed on once.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Self

from megappo.errors import ExitCode
from megappo.launcher.environment import rank_environment
from megappo.launcher.outcome import Outcome, tell
from megappo.parallel.meeting import listening

POLL_SECONDS = 0.05
CLOSING_SECONDS = 3.0
"""After a failure or Ctrl-C: time to flush files. Peers of a dead rank notice it by themselves, or never."""
SECOND_SIGNAL_SECONDS = 8.0
"""After a second SIGTERM: time that is left to end."""


@dataclass(frozen=True)
class RankProgram:
    """What every rank runs, and how it is watched.

    `log_folder` takes the output of ranks 1 and up, `rank-00001.out`; rank 0 writes to the console. Without a folder
    it is kept only until the run has ended. `if_interrupted` gives the end of the line that Ctrl-C leaves.
    """

    command: tuple[str, ...]
    num_ranks: int
    environment: Mapping[str, str] = field(default_factory=dict)
    log_folder: Path | None = None
    stop_grace_seconds: float = 600.0
    if_interrupted: Callable[[], str] = lambda: "nothing was saved"


def run_local(program: RankProgram) -> ExitCode:
    """Runs the program's ranks to their end; prints the first failing rank's error. No process is left behind."""
    with tempfile.TemporaryDirectory(prefix="megappo-") as scratch, _Signals() as signals:
        with _Ranks(program, Path(scratch)) as ranks:
            outcome = _watch(ranks, signals, program.stop_grace_seconds)
        message = tell(outcome, Path(scratch), ranks.log_folder, program.if_interrupted)
        if message.text:
            print(message.text, file=sys.stderr, flush=True)
        return message.exit_code


class _Signals:
    """Counts the launcher's own signals while the ranks run."""

    def __init__(self) -> None:
        self.stops = 0
        self.interrupts = 0
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            self._before[number] = signal.signal(number, self._count)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]

    def _count(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupts += 1
        else:
            self.stops += 1


class _Ranks:
    """The processes of one world, and the order in which they failed."""

    def __init__(self, program: RankProgram, scratch: Path) -> None:
        self.log_folder = program.log_folder or scratch
        self.codes: list[int | None] = [None] * program.num_ranks
        self.failed_first: int | None = None
        self.killed = False
        self._program = program
        self._scratch = scratch
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.log_folder.mkdir(parents=True, exist_ok=True)
        try:
            with listening() as meeting:
                for rank in range(self._program.num_ranks):
                    self._processes.append(self._start(rank, meeting))
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()  # also what a rank that has ended left running in its session
        for process in self._processes:
            process.wait()

    def _start(self, rank: int, meeting: socket.socket) -> subprocess.Popen[bytes]:
        program = self._program
        own = rank_environment(rank, program.num_ranks, meeting, self._scratch)
        with ExitStack() as stack:
            output = None
            if rank > 0:
                output = stack.enter_context((self.log_folder / f"rank-{rank:05d}.out").open("wb"))
            return subprocess.Popen(
                program.command,
                env={**os.environ, **program.environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,
                pass_fds=(meeting.fileno(),) if rank == 0 else (),
            )

    def poll(self) -> bool:
        """Takes in who has ended; whether any rank still runs."""
        failed: list[tuple[bool, int]] = []
        for rank, process in enumerate(self._processes):
            if self.codes[rank] is None:
                code = self.codes[rank] = process.poll()
                if code not in (None, ExitCode.DONE, ExitCode.STOPPED_AFTER_SAVING):
                    failed.append((code > 0, rank))
        if failed and self.failed_first is None and not self.killed:
            # Of those seen at once, one that a signal has killed explains the others, which lost their peer.
            self.failed_first = min(failed)[1]
        return None in self.codes

    def send(self, number: signal.Signals) -> None:
        """Signals the ranks themselves; what they started is their own affair."""
        for rank, process in enumerate(self._processes):
            if self.codes[rank] is None:
                process.send_signal(number)

    def kill(self) -> None:
        """Ends every rank and what it has started."""
        self.killed = True
        for process in self._processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # it and all that it started have ended


def _watch(ranks: _Ranks, signals: _Signals, grace: float) -> Outcome:
    """Waits until all ranks have ended, handing signals on and ending those that stay too long."""
    deadline = float("inf")
    stops = interrupts = 0
    failure_seen = False
    while ranks.poll():
        now = time.monotonic()
        if signals.interrupts > interrupts:
            interrupts = signals.interrupts
            ranks.send(signal.SIGINT)
            deadline = min(deadline, now + (CLOSING_SECONDS if interrupts == 1 else 0))
        if signals.stops > stops:
            if stops == 0:
                ranks.send(signal.SIGTERM)
            deadline = min(deadline, now + (grace if stops == 0 else SECOND_SIGNAL_SECONDS))
            stops = signals.stops
        if ranks.failed_first is not None and not failure_seen:
            failure_seen = True
            deadline = min(deadline, now + CLOSING_SECONDS)
        if now >= deadline:
            ranks.kill()
        time.sleep(POLL_SECONDS)
    return Outcome(
        codes=tuple(code or 0 for code in ranks.codes),
        failed_first=ranks.failed_first,
        was_interrupted=signals.interrupts > 0,
        was_stopped=signals.stops > 0,
        was_killed=ranks.killed,
    )
