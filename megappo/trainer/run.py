"""What a rank does for each command: join the mesh, build, run, leave. The command line is in `cli/`."""

from __future__ import annotations

from datetime import timedelta

import torch

from megappo.config.experiment import ExperimentConfig
from megappo.errors import ExitCode
from megappo.parallel.mesh import start_mesh, stop_mesh
from megappo.trainer.build import build_trainer


def train(config: ExperimentConfig) -> ExitCode:
    """Runs an experiment on the ranks that were started."""
    torch.set_num_threads(config.trainer.num_threads)
    mesh = start_mesh(
        config.layout, seed=config.trainer.seed, timeout=timedelta(minutes=config.trainer.timeout_minutes)
    )
    outcome = build_trainer(config, mesh).fit()
    stop_mesh()
    return outcome
