"""What the commands that read an experiment file share: its arguments, and the check before anything is started."""

import argparse
import sys
from pathlib import Path

from megappo.config.checkpoint_names import finish_interrupted
from megappo.config.checks import check_experiment
from megappo.config.experiment import ExperimentConfig
from megappo.config.load import LoadedExperiment, read_experiment
from megappo.config.problem import Severity, raise_errors
from megappo.config.stages import read_stage
from megappo.launcher.environment import is_joined, joined_world_size, own_rank, own_task
from megappo.launcher.world import count_gpus, local_world_size
from megappo.observe.run_folder import RunFolder


def add_experiment(parser: argparse.ArgumentParser) -> None:
    """FILE and its overrides."""
    parser.add_argument("file", metavar="FILE", help="experiment file, for example yaml/demo_cpu.yaml")
    parser.add_argument("--stage", metavar="NAME", help="of a file with stages, this one alone")
    parser.add_argument("overrides", metavar="a.b=c", nargs="*", default=[], help="settings laid over the file")


def add_nproc(parser: argparse.ArgumentParser) -> None:
    """How many local ranks."""
    parser.add_argument(
        "--nproc", type=positive, metavar="N",
        help="local ranks (default: tp·pp·cp·dp of the layout; without dp one for each GPU, or the fewest on a CPU)",
    )  # fmt: skip


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def read_arguments(arguments: argparse.Namespace, *more_overrides: str) -> LoadedExperiment:
    """The experiment of the command line; raises ConfigError."""
    overrides = [*arguments.overrides, *more_overrides]
    if arguments.stage is not None:
        return read_stage(arguments.file, overrides, arguments.stage)
    return read_experiment(arguments.file, overrides)


def name_interrupted(config: ExperimentConfig) -> None:
    """Gives their names back to checkpoints and exports of the run that a kill left without, before anyone looks which
    there are. One process of srun does; what it sees counts."""
    if own_rank() == 0 and own_task() == 0:
        folder = RunFolder(Path(config.trainer.run_dir))
        finish_interrupted(folder.checkpoints)
        finish_interrupted(folder.hf)


def world_size(loaded: LoadedExperiment, nproc: int | None) -> int:
    """Ranks of this run: those that were started around this process, else those that it will start."""
    return joined_world_size() if is_joined() else local_world_size(loaded.config.layout, nproc, count_gpus())


def refuse_unsound(loaded: LoadedExperiment, num_ranks: int | None) -> None:
    """Prints the warnings once and raises ConfigError with all errors of the experiment."""
    problems = check_experiment(loaded.config, num_ranks)
    for problem in problems:
        if problem.severity is Severity.WARNING and own_rank() == 0:
            print(f"warning: {problem.text(loaded.locations)}", file=sys.stderr)
    raise_errors(problems, loaded.locations)
