"""`megappo train FILE`: runs the experiment, on local ranks of its own or as one of the ranks that were started."""

import argparse
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from megappo.cli.built_on import note_models
from megappo.cli.experiment import (
    add_experiment,
    add_nproc,
    name_interrupted,
    read_arguments,
    refuse_unsound,
    world_size,
)
from megappo.cli.stages import Stages
from megappo.config.checkpoint_folder import checkpoint_to_resume, going_on, latest_checkpoint
from megappo.config.load import LoadedExperiment
from megappo.config.requests import TrainRequest
from megappo.config.stages import has_stages
from megappo.errors import ConfigError, ExitCode
from megappo.launcher.start import run_on_ranks


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `megappo train` with its options."""
    parser = commands.add_parser(
        "train",
        help="run an experiment: PPO, or with trainer.kind sft, reward_model or dpo",
        description="Runs an experiment: PPO, or what trainer.kind says (sft, reward_model, dpo).",
        epilog="example: megappo train yaml/demo_cpu.yaml trainer.run_dir=runs/mine",
    )
    add_experiment(parser)
    add_nproc(parser)
    parser.add_argument(
        "--resume", action="store_true",
        help="go on from the run's newest checkpoint, else from that of trainer.resume, else from the start",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Checks the experiment, makes its folder, and runs it on ranks; returns what they end with. Raises UserError."""
    if arguments.stage is None and has_stages(arguments.file):
        stages = Stages(arguments.file, arguments.overrides, arguments.nproc, goes_on=arguments.resume)
        return stages.run(partial(run_experiment, nproc=arguments.nproc))
    loaded = read_arguments(arguments)
    name_interrupted(loaded.config)
    if arguments.stage is not None:
        Stages(arguments.file, arguments.overrides, arguments.nproc).check_alone(arguments.stage)
    if arguments.resume:
        loaded = replace(loaded, config=going_on(loaded.config))
    return run_experiment(loaded, arguments.nproc)


def run_experiment(loaded: LoadedExperiment, nproc: int | None) -> ExitCode:
    """Runs one experiment; returns what its ranks end with."""
    num_ranks = world_size(loaded, nproc)
    refuse_unsound(loaded, num_ranks)
    checkpoint_to_resume(loaded.config)  # refuses what can't be resumed before a rank is started
    trainer = loaded.config.trainer
    make_run_folder(Path(trainer.run_dir))
    note_models(loaded)
    return run_on_ranks(
        TrainRequest(config=loaded.config),
        num_ranks,
        num_threads=trainer.num_threads,
        log_folder=Path(trainer.run_dir) / "logs",
        stop_grace_seconds=trainer.stop_grace_seconds,
        if_interrupted=partial(tell_last_checkpoint, Path(trainer.run_dir)),
    )


def make_run_folder(run_dir: Path) -> None:
    """Makes the run's folder; ConfigError where that can't be, or where nothing can be written into it."""
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        raise ConfigError(
            f"trainer.run_dir: {run_dir} can't be written to ({error.strerror}: {error.filename}); give another "
            "folder, for example runs/test"
        ) from None


def tell_last_checkpoint(run_dir: Path) -> str:
    """What is left after Ctrl-C."""
    latest = latest_checkpoint(run_dir / "checkpoints")
    if latest is None:
        return f"{run_dir} has no checkpoint yet"
    return f"the last checkpoint is {latest}; go on from it with --resume"
