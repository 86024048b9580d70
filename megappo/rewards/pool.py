"""Reward processes that can be killed: a function that hangs, crashes or exits costs its sample, never the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait

from megappo.errors import RewardError
from megappo.rewards.process import Answer, Broken, Call, Part, Ready, timed_out

START_SECONDS = 300.0
EXIT_SECONDS = 5.0
ASYNC_CALLS_AT_ONCE = 64
# An `async def` that is late is cancelled by its own event loop; only one that also blocks the loop needs killing.
ASYNC_GRACE_SECONDS = 2.0


@dataclass
class _Process:
    """A reward process, and the calls that it owes answers to."""

    popen: subprocess.Popen[bytes]
    connection: Connection
    deadline: float
    ready: bool = False
    owed: dict[int, Call] = field(default_factory=dict)

    def kill(self) -> None:
        """Ends the process and all that it has started."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):  # it may have ended on its own
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


class RewardPool:
    """Runs calls of reward functions on up to `size` processes, started when first needed and kept for the run.

    `timeout`: seconds that one call may take. `async_parts`: which of `parts` are `async def`, many calls of which
    share a process.
    """

    def __init__(self, parts: Sequence[Part], async_parts: frozenset[int], size: int, timeout: float) -> None:
        assert size >= 1, "a reward pool needs a process"
        self._parts = list(parts)
        self._async_parts = async_parts
        self._size = size
        self._timeout = timeout
        self._processes: list[_Process] = []

    def run(self, calls: Sequence[Call]) -> dict[int, Answer]:
        """The answer of each call by its key, failures included; raises RewardError where no process can start."""
        batches = self._batched(calls)
        answers: dict[int, Answer] = {}
        try:
            while len(answers) < len(calls):
                self._assign(batches)
                self._collect(answers)
        except BaseException:
            self.close()  # an interrupt leaves calls behind whose answers the next run would take for its own
            raise
        return answers

    def close(self) -> None:
        """Ends all processes."""
        while self._processes:
            self._processes.pop().kill()

    def _batched(self, calls: Sequence[Call]) -> deque[list[Call]]:
        """Calls that go to a process together: one of a function that blocks, many of an `async def`."""
        batches: deque[list[Call]] = deque()
        pending: dict[int, list[Call]] = {}
        for call in calls:
            if call.part not in self._async_parts:
                batches.append([call])
                continue
            pending.setdefault(call.part, []).append(call)
        for waiting in pending.values():
            batches.extend(
                waiting[start : start + ASYNC_CALLS_AT_ONCE] for start in range(0, len(waiting), ASYNC_CALLS_AT_ONCE)
            )
        return batches

    def _assign(self, batches: deque[list[Call]]) -> None:
        """Gives waiting batches to idle processes, and starts more of these while there is work for them."""
        for process in list(self._processes):
            if batches and process.ready and not process.owed:
                self._give(process, batches)
        starting = sum(not process.ready for process in self._processes)
        while len(self._processes) < self._size and starting < len(batches):
            self._processes.append(self._start())
            starting += 1

    def _give(self, process: _Process, batches: deque[list[Call]]) -> None:
        batch = batches.popleft()
        try:
            process.connection.send(batch)
        except (BrokenPipeError, ConnectionResetError):
            batches.appendleft(batch)  # it died while idle: nobody's sample is at fault
            self._discard(process)
            return
        process.owed = {call.key: call for call in batch}
        grace = ASYNC_GRACE_SECONDS if batch[0].part in self._async_parts else 0.0
        process.deadline = time.monotonic() + self._timeout + grace

    def _collect(self, answers: dict[int, Answer]) -> None:
        """Waits for messages or the nearest deadline, and takes what there is."""
        busy = {process.connection: process for process in self._processes if process.owed or not process.ready}
        if not busy:
            return
        nearest = min(process.deadline for process in busy.values())
        for connection in wait(list(busy), timeout=max(0.0, nearest - time.monotonic())):
            self._receive(busy[connection], answers)  # type: ignore[index]
        now = time.monotonic()
        for process in busy.values():
            if process in self._processes and (process.owed or not process.ready) and now >= process.deadline:
                self._give_up(process, answers, timed_out(self._timeout))

    def _receive(self, process: _Process, answers: dict[int, Answer]) -> None:
        try:
            message = process.connection.recv()
        except (EOFError, ConnectionResetError):
            # Its own exit code tells more than that of our kill, which is for one that closed the pipe and lives on.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(timeout=EXIT_SECONDS)
            code = process.popen.returncode
            self._give_up(process, answers, f"the reward process ended with exit code {code} while scoring this sample")
            return
        match message:
            case Ready():
                process.ready = True
            case Broken():
                raise RewardError(message.error)
            case Answer():
                answers[message.key] = message
                del process.owed[message.key]

    def _give_up(self, process: _Process, answers: dict[int, Answer], reason: str) -> None:
        """Ends a process that is late or dead; what it owed has failed."""
        self._discard(process)
        if not process.ready:
            raise RewardError(
                f"a reward process did not start ({', '.join(part.path for part in self._parts)}): exit code "
                f"{process.popen.returncode} within {START_SECONDS:g} s; its output is above"
            )
        for key in process.owed:
            answers[key] = Answer(key, None, error=reason)

    def _discard(self, process: _Process) -> None:
        self._processes.remove(process)
        process.kill()

    def _start(self) -> _Process:
        ours, theirs = Pipe()
        descriptor = theirs.fileno()
        arguments = [str(descriptor), str(os.getpid()), str(self._timeout)]
        popen = subprocess.Popen(
            [sys.executable, "-m", "megappo.rewards.process", *arguments],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            # The same modules as here, however this interpreter came by them.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            # Its own process group: killed with its children, and not by a Ctrl-C that the trainer answers first.
            start_new_session=True,
        )
        theirs.close()
        process = _Process(popen, ours, deadline=time.monotonic() + START_SECONDS)
        ours.send(self._parts)
        return process
