"""Runs a request on ranks: as one of those that torchrun or srun started, or on local ranks of its own."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from megappo.config.requests import Command, Request
from megappo.errors import ConfigError, ExitCode
from megappo.launcher.environment import is_joined, joined_world_size, settings, unjoined_tasks
from megappo.launcher.local import RankProgram, run_local
from megappo.launcher.rank import run_rank
from megappo.launcher.run_status import record_end
from megappo.launcher.world import count_gpus


def run_on_ranks(
    request: Request,
    num_ranks: int,
    *,
    num_threads: int = 1,
    log_folder: Path | None = None,
    stop_grace_seconds: float = 600.0,
    if_interrupted: Callable[[], str] = lambda: "nothing was saved",
) -> ExitCode:
    """Runs `request` on `num_ranks` ranks and returns the exit code of the command.

    Raises ConfigError where this process is a rank of a world of another size, or one of several tasks of srun that
    would each start ranks of their own.
    """
    if unjoined_tasks():
        raise ConfigError(
            f"srun started {unjoined_tasks()} tasks that know nothing of each other (RANK and WORLD_SIZE are missing); "
            "let each one run `. launch/env.sh; join_slurm` first, as launch/slurm.sbatch does, or start one task"
        )
    variables = settings(num_threads, on_gpu=count_gpus() > 0)
    if is_joined():
        if joined_world_size() != num_ranks:
            raise ConfigError(
                f"{joined_world_size()} ranks were started, and this command needs {num_ranks}; start that many"
            )
        for name, value in variables.items():
            os.environ.setdefault(name, value)
        return run_rank(request)
    command = Command.of(request).value
    with tempfile.TemporaryDirectory(prefix="megappo-") as folder:
        file = Path(folder) / "request.json"
        file.write_text(request.model_dump_json(), encoding="utf-8")
        program = RankProgram(
            command=(sys.executable, "-m", "megappo.launcher.rank", command, str(file)),
            num_ranks=num_ranks,
            environment=variables,
            log_folder=log_folder,
            stop_grace_seconds=stop_grace_seconds,
            if_interrupted=if_interrupted,
        )
        code = run_local(program)
        record_end(request, code)
        return code
