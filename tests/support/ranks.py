"""Runs a program on several CPU ranks and returns what it wrote: start-up dominates, so one program checks many
things."""

import json
import os
import signal
import subprocess
import sys
import tempfile
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

    The ranks are forked from one process that has imported the program, or started by torchrun, each on its own: what a
    GPU and vLLM need. Raises AssertionError with the end of the output where a rank fails or the time is over; no
    process is left behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        if torchrun:
            command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}"]
            # The rendezvous takes a free port itself: one that is looked for here may be gone when it is used.
            command += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "-m", module]
        else:
            command = [sys.executable, "-m", "tests.support.fork_ranks", str(nproc), module]
        command += [*map(str, arguments), "--out", str(out)]
        process = subprocess.Popen(
            command, cwd=ROOT, env=rank_environment(), text=True, start_new_session=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            raise AssertionError(f"{module} on {nproc} ranks took over {timeout:.0f} s:\n{_told(output)}") from None
        assert process.returncode == 0, f"{module} on {nproc} ranks failed:\n{_told(output)}"
        return json.loads(out.read_text()) if out.exists() else None


def _told(output: str) -> str:
    """The first traceback, of the rank that failed, and the end, where others and torchrun have more to say."""
    start = output.find("Traceback")
    end = output[-4000:]
    return f"{output[start : start + 8000]}\n…\n{end}" if 0 <= start < len(output) - 8000 else output[-12000:]
