"""Runs a program on several CPU ranks and returns what it wrote: start-up dominates, so one program checks many
things."""

import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def meeting_environment(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The place of one rank on this host, in the words of torchrun, whose agent has the store at `port`."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def rank_environment() -> dict[str, str]:
    """One thread a rank, no accelerator, no hub, and the project on the path."""
    return os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


def run_ranks(module: str, *arguments: object, nproc: int, timeout: float = 300, torchrun: bool = False) -> Any:
    """Runs `python -m module ARGUMENTS --out FILE` on `nproc` ranks; the program's rank 0 writes JSON to FILE.

    The ranks are forked from one process that has imported the product, or started by torchrun, each on its own: what a
    GPU and vLLM need. Raises AssertionError with the end of the output where a rank fails or the time is over; no
    process is left behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        words = [*map(str, arguments), "--out", str(out)]
        if torchrun:
            code, output = _launched(module, words, nproc, timeout)
        else:
            code, output = fork_server().run(module, words, nproc, timeout)
        assert code is not None, f"{module} on {nproc} ranks took over {timeout:.0f} s:\n{_told(output)}"
        assert code == 0, f"{module} on {nproc} ranks failed:\n{_told(output)}"
        return json.loads(out.read_text()) if out.exists() else None


def _launched(module: str, words: Sequence[str], nproc: int, timeout: float) -> tuple[int | None, str]:
    """By torchrun. The exit code, None where the time was over, and the output."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}"]
    # The rendezvous takes a free port itself: one that is looked for here may be gone when it is used.
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "-m", module, *words]
    process = subprocess.Popen(
        command, cwd=ROOT, env=rank_environment(), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return None, output
    return process.returncode, output


class ForkServer:
    """`tests.support.fork_server`, which ends with this process."""

    def __init__(self) -> None:
        self._environment = self._now()
        answers, theirs = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.fork_server", str(theirs)], cwd=ROOT, env=self._environment,
            bufsize=0, start_new_session=True, stdin=subprocess.PIPE, pass_fds=[theirs],
        )  # fmt: skip
        os.close(theirs)
        self._answers = open(answers, "rb", buffering=0)  # noqa: SIM115  as long as this process

    def run(self, module: str, words: Sequence[str], nproc: int, timeout: float) -> tuple[int | None, str]:
        """The exit code, None where the time was over, and the output."""
        assert self._now() == self._environment, "ranks are forked with the environment of the first ones"
        to_server = self._process.stdin
        assert to_server is not None
        with tempfile.NamedTemporaryFile("r", errors="replace") as output:
            to_server.write(json.dumps([nproc, module, list(words), output.name]).encode() + b"\n")
            child = int(self._answers.readline())
            in_time, _, _ = select.select([self._answers], [], [], timeout)
            if not in_time:
                os.killpg(child, signal.SIGKILL)
            code = int(self._answers.readline())
            return code if in_time else None, output.read()

    @staticmethod
    def _now() -> dict[str, str]:
        return {name: value for name, value in rank_environment().items() if name != "PYTEST_CURRENT_TEST"}


@functools.cache
def fork_server() -> ForkServer:
    return ForkServer()


def _told(output: str) -> str:
    """The first traceback, of the rank that failed, and the end, where others and torchrun have more to say."""
    start = output.find("Traceback")
    end = output[-4000:]
    return f"{output[start : start + 8000]}\n…\n{end}" if 0 <= start < len(output) - 8000 else output[-12000:]
