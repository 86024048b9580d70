"""Tiny programs as ranks of the local launcher."""

import sys
import time

from megappo.errors import ExitCode
from megappo.launcher.local import RankProgram, run_local

# Each program may use `rank`, and ends as it likes.
PRELUDE = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ["RANK"])
"""


def fake(body: str) -> tuple[str, ...]:
    """The command that runs `body` after the prelude."""
    return (sys.executable, "-c", PRELUDE + body)


def run(body: str, num_ranks: int = 3, **settings: object) -> tuple[ExitCode, float]:
    """Runs `body` on so many ranks; how it ended, and after how many seconds."""
    begin = time.monotonic()
    code = run_local(RankProgram(fake(body), num_ranks, **settings))  # type: ignore[arg-type]
    return code, time.monotonic() - begin


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
