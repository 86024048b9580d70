"""What the commands that read a model or checkpoint share: layout options, and checks of the folder and the ranks."""

import argparse
from collections.abc import Collection, Iterable
from dataclasses import replace

from megappo.cli.experiment import positive
from megappo.config.checkpoint_folder import MODEL_FILES
from megappo.config.checkpoint_names import readable
from megappo.config.checks_layout import (
    dense_problems,
    expert_layout_problems,
    model_parallel_problems,
    sequence_problems,
    world_problems,
)
from megappo.config.layout import LayoutConfig
from megappo.config.layout_options import LAYOUT_OPTIONS, with_option_names
from megappo.config.model_folder import ADAPTERS, ModelFacts, ModelFolderError, read_model_facts
from megappo.config.problem import Problem, raise_errors
from megappo.errors import ConfigError
from megappo.launcher.environment import is_joined, joined_world_size
from megappo.launcher.world import count_gpus, local_world_size

SIZES = {
    "tp": "tensor parallel size",
    "pp": "pipeline parallel size",
    "ep": "expert parallel size: ranks that share the experts of a layer",
    "etp": "ranks that each expert is cut over",
}
"""Parallel sizes of section `layout` that are options too, and what they are."""


def add_layout(parser: argparse.ArgumentParser, *, dp: str, default: str = "1", runs_model: bool = True) -> None:
    """--tp, --pp, --ep, --etp and --dp, of which `dp` says what they do; --sequence-parallel where the model is run."""
    group = parser.add_argument_group("layout", "ranks = tp · pp · dp; experts are spread over the tp · dp of a stage")
    for name, meaning in SIZES.items():
        group.add_argument(f"--{name}", type=positive, metavar="N", help=f"{meaning} (default: {default})")
    group.add_argument("--dp", type=positive, metavar="N", help=dp)
    if runs_model:
        group.add_argument(
            "--sequence-parallel", action="store_const", const=True,
            help="shard norms and residuals over the TP ranks, which then send each token to its experts once",
        )  # fmt: skip


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """--dtype."""
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="type of the weights (default: the model's)")


def add_base(parser: argparse.ArgumentParser) -> None:
    """--base."""
    parser.add_argument(
        "--base", metavar="PATH",
        help="Hugging Face folder of the model under a checkpoint's adapters (default: where its run read it)",
    )  # fmt: skip


def typed_settings(arguments: argparse.Namespace) -> dict[str, int | bool]:
    """The settings of section `layout` that were typed as options."""
    return {name: value for name in LAYOUT_OPTIONS if (value := getattr(arguments, name, None)) is not None}


def existing_folder(option: str, folder: str) -> None:
    """Raises ConfigError where the folder of an option is not there."""
    if not readable(folder).is_dir():
        raise ConfigError(f"{option} {folder}: there is no such folder; give a Hugging Face folder or a checkpoint")


def model_facts(option: str, folder: str) -> ModelFacts | None:
    """The sizes of the model in `folder`, a Hugging Face folder or a checkpoint; None where it is neither, which the
    ranks tell. Raises ConfigError where `folder` is missing, or its model is none that can be built."""
    existing_folder(option, folder)
    found = readable(folder)
    places = (found, found / MODEL_FILES)
    place = next((place for place in places if (place / "config.json").exists()), None)
    if place is None and (found / ADAPTERS).exists():
        place = found  # no model either, which the facts say
    if place is None:
        return None
    try:
        return read_model_facts(str(place))
    except ModelFolderError as error:
        raise ConfigError(f"{option} {folder}: {error}") from None


def checked_layout(folder: str, facts: ModelFacts | None, layout: LayoutConfig) -> tuple[LayoutConfig, int]:
    """`layout` as it is built, with its data-parallel size, and the number of ranks. Raises ConfigError, in the words
    of the options, where it does not divide the model or the ranks, or the machine has fewer GPUs.

    Without --dp there are as many copies as ranks were started by torchrun or srun; else as few as hold all experts.
    """
    problems = sequence_problems(layout)
    if facts is not None:
        problems += model_parallel_problems(facts, folder, layout.tp, layout.pp)
        problems += expert_layout_problems(layout, folder, facts) + dense_problems(layout, folder, [facts])
    started = joined_world_size() if is_joined() else None
    if layout.dp is None and started is None:
        layout = layout.model_copy(update={"dp": layout.fewest_copies})
    problems += world_problems(layout, started)
    raise_errors(as_options(problems, LAYOUT_OPTIONS))
    num_ranks = local_world_size(layout, None, count_gpus()) if started is None else started
    # Shards of shared experts are not run, only moved; Megatron (0.16.1) warns on every rank without it.
    sequence_parallel = layout.sequence_parallel or (layout.tp > 1 and layout.ep > 1)
    dp = num_ranks // layout.model_parallel_size
    return layout.model_copy(update={"dp": dp, "sequence_parallel": sequence_parallel}), num_ranks


def as_options(problems: Iterable[Problem], names: Collection[str]) -> list[Problem]:
    """The problems, with those settings of section `layout` under the names that were typed: `--ep 3`."""
    return [_as_option(problem, names) for problem in problems]


def _as_option(problem: Problem, names: Collection[str]) -> Problem:
    path, reason, remedy = (with_option_names(text, names) for text in (problem.path, problem.reason, problem.remedy))
    if not path.startswith("--"):
        return replace(problem, reason=reason, remedy=remedy)
    if problem.value in ("true", "false"):  # a flag, which has no value to set
        head = path if problem.value == "true" else f"{path} is missing"
        remedy = remedy.replace("set it to true, or", "add it, or set").replace(
            "set it to false, or", "leave it out, or set"
        )
    else:
        head = f"{path} {problem.value}"
    return replace(problem, path=head, value=None, reason=reason, remedy=remedy)
