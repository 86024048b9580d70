"""The environment of a rank: what the local launcher sets, and what a rank that torchrun or srun started finds."""

import os
import socket
import tempfile
from pathlib import Path

import psutil

from megappo.launcher.failure import FAILURE_DIR
from megappo.parallel.meeting import MEETING_SOCKET

LAUNCHER_PID = "MEGAPPO_LAUNCHER_PID"
"""Environment variable: the process that a local rank must not outlive."""


def is_joined() -> bool:
    """Whether another launcher (torchrun, srun with launch/env.sh) has already started the ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def unjoined_tasks() -> int:
    """Tasks of an srun step that know nothing of each other; 0 where this process is in none, or has joined them."""
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    return tasks if tasks > 1 and not is_joined() else 0


def own_task() -> int:
    """This process's number in its srun step, else 0."""
    return int(os.environ.get("SLURM_PROCID", "0")) if unjoined_tasks() else 0


def own_rank() -> int:
    return int(os.environ.get("RANK", "0"))


def joined_world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def settings(num_threads: int, on_gpu: bool) -> dict[str, str]:
    """Variables that have to be set before torch is imported, whoever starts the rank."""
    shared = {
        "OMP_NUM_THREADS": str(num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        # Megatron overlaps tensor-parallel communication with computation only if kernels start in the order of calls.
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    # Megatron compiles small fused functions, which on a CPU takes longer than it saves.
    return shared if on_gpu else shared | {"TORCHDYNAMO_DISABLE": "1"}


def rank_environment(rank: int, num_ranks: int, meeting: socket.socket, claims: Path) -> dict[str, str]:
    """Variables of one rank of a world that lives on this machine and meets at the socket."""
    address, port = meeting.getsockname()
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        MEETING_SOCKET: str(meeting.fileno()),
        "PYTHONUNBUFFERED": "1",
        FAILURE_DIR: str(claims),
        LAUNCHER_PID: str(os.getpid()),
    }


def failure_folder() -> Path:
    """Folder of this run's claim: the launcher's, else one in the system's temporary folder that only this run has.

    The parent process and its start time tell two runs apart that share an address, a port and a job number, as a
    requeued job does.
    """
    given = os.environ.get(FAILURE_DIR)
    if given:
        return Path(given)
    parent = psutil.Process(os.getppid())
    names = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID")
    parts = [os.environ.get(name, "") for name in names] + [str(parent.pid), f"{parent.create_time():.0f}"]
    return Path(tempfile.gettempdir()) / "-".join(["megappo", *(part.replace("/", "_") for part in parts if part)])
