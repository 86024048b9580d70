"""`megappo validate FILE`: checks an experiment without torch and prints how its batches are cut."""

import argparse

from megappo.cli.experiment import add_experiment, positive, read_arguments, refuse_unsound
from megappo.config.checks import data_parallel_size
from megappo.config.experiment import ExperimentConfig
from megappo.config.load import LoadedExperiment
from megappo.config.stages import has_stages, read_stages
from megappo.errors import ExitCode
from megappo.models.fits import require_fitting_models
from megappo.planner.explain import explain_batches


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `megappo validate` with its options."""
    parser = commands.add_parser(
        "validate",
        help="check an experiment file and print its batch arithmetic",
        description="Checks an experiment without torch, and prints how its batches are cut.",
        epilog="example: megappo validate yaml/demo_cpu.yaml --nproc 8",
    )
    add_experiment(parser)
    parser.add_argument("--nproc", type=positive, metavar="N", help="check for a run on N ranks")
    parser.add_argument("--data", action="store_true", help="also read the data and import the reward functions")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Raises UserError with every mistake; prints the split of the batches where there is none."""
    if arguments.stage is None and has_stages(arguments.file):
        for name, loaded in read_stages(arguments.file, arguments.overrides, as_planned=True).items():
            print(f"stage {name}")
            _validate(loaded, arguments.nproc, read_data=arguments.data)
    else:
        _validate(read_arguments(arguments), arguments.nproc, read_data=arguments.data)
    print(f"{arguments.file} is valid")
    return ExitCode.DONE


def _validate(loaded: LoadedExperiment, nproc: int | None, *, read_data: bool) -> None:
    refuse_unsound(loaded, nproc)
    require_fitting_models(loaded.config)
    dp = data_parallel_size(loaded.config, nproc)
    print(explain_batches(loaded.config, dp or 1))
    if dp is None:
        print("        dp follows from the number of ranks; this is the split for dp 1 (--nproc N shows another)")
    if read_data:
        print(_read_data(loaded.config))


def _read_data(config: ExperimentConfig) -> str:
    """Reads data and imports rewards as the run will; raises DataError, ConfigError or RewardError as it would."""
    # here: torch, tokenizers and data sets take seconds to import
    from megappo.environments.load import load_environment
    from megappo.rewards.build import build_reward
    from megappo.trainer.read_data import read_data

    if config.reward is not None:
        build_reward(config.reward).close()
    if config.rollout.multi_turn.enable:
        load_environment(str(config.rollout.multi_turn.environment))
    return read_data(config)
