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
        self._waiting: dict[int, deque[Call]] = {number: deque() for number in range(len(self._parts))}
        self._answers: dict[int, Answer] = {}
        self._error: RewardError | None = None

    def submit(self, calls: Sequence[Call]) -> None:
        """Queues calls, gives what it can to the processes, and takes what answers there are, without waiting."""
        for call in calls:
            self._waiting[call.part].append(call)
        try:
            self._assign()
            self._collect(wait_for_answers=False)
        except RewardError as error:
            self._error = error  # told by `collect`: whoever submits has something else to finish first

    def collect(self, keys: Sequence[int]) -> dict[int, Answer]:
        """The answers of calls that were submitted, failures included; waits for them.

        Raises RewardError where no process can start.
        """
        try:
            if self._error is not None:
                raise self._error
            while not all(key in self._answers for key in keys):
                self._assign()
                self._collect(wait_for_answers=True)
        except BaseException:
            self.close()  # an interrupt leaves calls behind whose answers the next ones would take for their own
            raise
        return {key: self._answers.pop(key) for key in keys}

    def close(self) -> None:
        """Ends all processes, and forgets all calls."""
        while self._processes:
            self._processes.pop().kill()
        for waiting in self._waiting.values():
            waiting.clear()
        self._answers.clear()
        self._error = None

    def _next_batch(self) -> list[Call]:
        """Calls that go to a process together: one of a function that blocks, many of an `async def`."""
        part, waiting = next((part, waiting) for part, waiting in self._waiting.items() if waiting)
        size = min(len(waiting), ASYNC_CALLS_AT_ONCE if part in self._async_parts else 1)
        return [waiting.popleft() for _ in range(size)]

    def _num_batches(self) -> int:
        """How many batches wait."""
        return sum(
            -(-len(waiting) // (ASYNC_CALLS_AT_ONCE if part in self._async_parts else 1))
            for part, waiting in self._waiting.items()
        )

    def _assign(self) -> None:
        """Gives waiting batches to idle processes, and starts more of these while there is work for them."""
        for process in list(self._processes):
            if self._num_batches() and process.ready and not process.owed:
                self._give(process)
        starting = sum(not process.ready for process in self._processes)
        while len(self._processes) < self._size and starting < self._num_batches():
            self._processes.append(self._start())
            starting += 1

    def _give(self, process: _Process) -> None:
        batch = self._next_batch()
        try:
            process.connection.send(batch)
        except (BrokenPipeError, ConnectionResetError):
            # It died while idle: nobody's sample is at fault.
            self._waiting[batch[0].part].extendleft(reversed(batch))
            self._discard(process)
            return
        process.owed = {call.key: call for call in batch}
        grace = ASYNC_GRACE_SECONDS if batch[0].part in self._async_parts else 0.0
        process.deadline = time.monotonic() + self._timeout + grace

    def _collect(self, *, wait_for_answers: bool) -> None:
        """Takes what messages there are, having waited for some or for the nearest deadline where asked to."""
        busy = {process.connection: process for process in self._processes if process.owed or not process.ready}
        if not busy:
            return
        nearest = min(process.deadline for process in busy.values())
        patience = max(0.0, nearest - time.monotonic()) if wait_for_answers else 0.0
        for connection in wait(list(busy), timeout=patience):
            process = busy[connection]  # type: ignore[index]
            # All of them: what was answered in time must not be late because it was fetched late.
            while process in self._processes and (process.owed or not process.ready) and process.connection.poll():
                self._receive(process)
        now = time.monotonic()
        for process in busy.values():
            if process in self._processes and (process.owed or not process.ready) and now >= process.deadline:
                self._give_up(process, timed_out(self._timeout))

    def _receive(self, process: _Process) -> None:
        try:
            message = process.connection.recv()
        except (EOFError, ConnectionResetError):
            # Its own exit code tells more than that of our kill, which is for one that closed the pipe and lives on.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(timeout=EXIT_SECONDS)
            code = process.popen.returncode
            self._give_up(process, f"the reward process ended with exit code {code} while scoring this sample")
            return
        match message:
            case Ready():
                process.ready = True
            case Broken():
                raise RewardError(message.error)
            case Answer():
                self._answers[message.key] = message
                del process.owed[message.key]

    def _give_up(self, process: _Process, reason: str) -> None:
        """Ends a process that is late or dead; what it owed has failed."""
        self._discard(process)
        if not process.ready:
            raise RewardError(
                f"a reward process did not start ({', '.join(part.path for part in self._parts)}): exit code "
                f"{process.popen.returncode} within {START_SECONDS:g} s; its output is above"
            )
        for key in process.owed:
            self._answers[key] = Answer(key, None, error=reason)

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
