"""What the commands that read a model or checkpoint share: layout arguments, and checks of the folder."""

import argparse
from pathlib import Path

from megappo.cli.experiment import positive
from megappo.config.checks_layout import model_parallel_problems
from megappo.config.model_folder import ModelFolderError, read_model_facts
from megappo.config.problem import raise_errors
from megappo.errors import ConfigError


def add_layout(parser: argparse.ArgumentParser) -> None:
    """--tp, --pp and --dtype."""
    parser.add_argument("--tp", type=positive, default=1, metavar="N", help="tensor parallel size (default 1)")
    parser.add_argument("--pp", type=positive, default=1, metavar="N", help="pipeline parallel size (default 1)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="type of the weights (default: the model's)")


def existing_folder(option: str, folder: str) -> None:
    """Raises ConfigError where the folder of an option is not there."""
    if not Path(folder).is_dir():
        raise ConfigError(f"{option} {folder}: there is no such folder; give a Hugging Face folder or a checkpoint")


def check_layout(option: str, folder: str, tp: int, pp: int) -> None:
    """Raises ConfigError where `folder` is missing, or a Hugging Face folder that tp or pp does not divide."""
    existing_folder(option, folder)
    if not (Path(folder) / "config.json").exists():
        return  # a checkpoint: its model is described in its own files, which the ranks read
    try:
        facts = read_model_facts(folder)
    except ModelFolderError as error:
        raise ConfigError(f"{option} {folder}: {error}") from None
    raise_errors(model_parallel_problems(facts, folder, tp, pp, tp_path="--tp", pp_path="--pp"))
