"""Runs a command for at most so many seconds, and leaves nothing running that it has started.

    python tools/limited.py SECONDS COMMAND …

The exit code is the command's, 124 where the time was over, and 143 where this program was told to end. Ranks of
torchrun and workers of vLLM have sessions of their own, which `timeout` does not reach; here they are found as
descendants, orphans too. Linux.
"""

import argparse
import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import IO, NoReturn

import psutil

TIME_OVER = 124
TERMINATED = 143
GRACE_SECONDS = 10.0
"""Between SIGTERM and SIGKILL: time to tell how far it came."""
POLL_SECONDS = 0.1
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", type=float)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a program and its arguments")
    options = parser.parse_args(arguments)
    if options.seconds <= 0 or not options.command:
        parser.error("give seconds (more than 0) and a command, such as: limited.py 300 make test-gpu")
    end_on_sigterm()
    code = run(options.command, options.seconds, grace=GRACE_SECONDS)
    if code is None:
        print(f"limited.py: cut off after {options.seconds:g} s", file=sys.stderr)
        return TIME_OVER
    return code if code >= 0 else 128 - code  # as a shell tells a signal


def end_on_sigterm() -> None:
    """From now on SIGTERM raises SystemExit, so that `run` can end what it has started."""

    def leave(number: int, frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would cut the end short
        sys.exit(TERMINATED)

    signal.signal(signal.SIGTERM, leave)


def run(
    command: Sequence[str],
    seconds: float | None = None,
    output: IO[bytes] | None = None,
    grace: float = 0.0,
    meanwhile: Callable[[], None] = lambda: None,
) -> int | None:
    """The command's exit code (negative: the signal that ended it); None where `seconds` were over.

    `output` takes both streams. `meanwhile` is called again and again. When it returns or raises, no process is left
    that the command has started. A command that is cut off gets SIGTERM and, after `grace` seconds, SIGKILL.
    """
    # Orphans of the command become children of this process, where they are found.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    others = set(psutil.Process().children(recursive=True))
    deadline = None if seconds is None else time.monotonic() + seconds
    process: subprocess.Popen[bytes] | None = None
    try:
        # Within the try: a signal may come when the command runs, and this call has not returned yet.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output and subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        while process.poll() is None:
            if deadline is not None and time.monotonic() >= deadline:
                return None
            meanwhile()
            time.sleep(POLL_SECONDS)
        return process.returncode
    finally:
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(grace)
            except subprocess.TimeoutExpired:
                process.kill()
        kill_descendants(others)
        if process is not None:
            process.wait()


def kill_descendants(spared: set[psutil.Process]) -> None:
    """Kills all descendants of this process but the `spared`, and those that come up meanwhile."""
    for _ in range(20):
        found = set(psutil.Process().children(recursive=True)) - spared
        alive = [process for process in found if _is_alive(process)]
        if not alive:
            return
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        time.sleep(0.05)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


if __name__ == "__main__":
    sys.exit(main())
