"""`megappo validate FILE`: checks an experiment without torch and prints how its batches are cut."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megappo.cli.experiment import add_experiment, positive, read_arguments, refuse_unsound
from megappo.config.checks import data_parallel_size
from megappo.config.experiment import ExperimentConfig
from megappo.config.load import LoadedExperiment
from megappo.config.stages import has_stages, read_stages
from megappo.errors import DataError, ExitCode
from megappo.models.fits import require_fitting_models
from megappo.planner.explain import explain_batches

Load = Callable[..., Sequence[Any]]
"""Reads files as one kind of training needs their rows."""


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
    """Reads prompts and imports rewards as the run will; raises DataError, ConfigError or RewardError as it would."""
    # here: tokenizers and data sets take seconds to import
    from megappo.data.preferences import load_preferences
    from megappo.data.prompts import load_prompts, load_supervised
    from megappo.data.tokenizer import run_tokenizer
    from megappo.environments.load import load_environment
    from megappo.rewards.build import build_reward

    if config.reward is not None:
        build_reward(config.reward).close()
    if config.rollout.multi_turn.enable:
        load_environment(str(config.rollout.multi_turn.environment))
    data = config.data
    if data.sets:
        return _read_sets(config)
    tokenizer = run_tokenizer(config.model)
    needs_answer = config.reward is None or config.reward.training_parts == config.reward.parts
    load_training: Load = partial(load_prompts, needs_answer=needs_answer)
    loads: dict[str, Load] = {"ppo": load_training, "sft": load_supervised}
    load: Load = loads.get(config.trainer.kind, load_preferences)
    # What learns from pairs is measured on pairs, a policy with a reward on its answers to prompts.
    has_pairs = config.trainer.kind == "reward_model" or (config.trainer.kind == "dpo" and config.reward is None)
    load_held_out: Load = load_preferences if has_pairs else load_prompts
    num_train = len(load(data, tokenizer, data.train_files, data.max_samples))
    if num_train < data.train_batch_size:
        raise DataError(
            f"data.train_files: {num_train} prompts can be used, and a step needs data.train_batch_size "
            f"{data.train_batch_size}; set it to {num_train} or less, or add files"
        )
    num_val = len(load_held_out(data, tokenizer, data.val_files, data.max_val_samples)) if data.val_files else 0
    steps = num_train // data.train_batch_size
    return f"data    {num_train} for training ({steps} steps an epoch), {num_val} held out"


def _read_sets(config: ExperimentConfig) -> str:
    """Reads every prompt set and its held-out prompts as the run will."""
    from megappo.data.tokenizer import run_tokenizer
    from megappo.trainer.prompt_sets import load_evaluation_sets, training_prompts

    tokenizer = run_tokenizer(config.model)
    loaded, order = training_prompts(config, tokenizer)
    num_val = sum(map(len, load_evaluation_sets(config, tokenizer).values()))
    sizes = ", ".join(f"{len(prompts)} of {one.name}" for one, prompts in zip(config.data.sets, loaded, strict=True))
    return f"data    {sizes} for training ({order.steps_per_epoch} steps draw as many), {num_val} held out"
