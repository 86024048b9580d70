"""`megappo evaluate FILE`: the experiment's held-out prompts, answered by a model and scored."""

import argparse
import json

from megappo.cli.experiment import add_experiment, add_nproc, read_arguments, world_size
from megappo.cli.model_arguments import add_layout, as_options, existing_folder, typed_settings
from megappo.config.checkpoint_folder import checkpoint_folder, readable_checkpoint
from megappo.config.checks import check_evaluation
from megappo.config.problem import raise_errors
from megappo.config.requests import EvaluateRequest
from megappo.errors import ConfigError, ExitCode
from megappo.launcher.start import run_on_ranks


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `megappo evaluate` with its options."""
    parser = commands.add_parser(
        "evaluate",
        help="score a model on the experiment's held-out prompts",
        description="Answers the experiment's held-out prompts with a model, and scores the answers.",
        epilog="example: megappo evaluate yaml/demo_cpu.yaml --model models/demo",
    )
    add_experiment(parser)
    add_nproc(parser)
    parser.add_argument(
        "--model", "--checkpoint", dest="model", metavar="PATH",
        help="Hugging Face folder or checkpoint (default: the newest checkpoint of the run)",
    )  # fmt: skip
    add_layout(
        parser,
        dp="copies of the dense weights, which share prompts and experts (default: as many as the ranks hold)",
        default="the experiment's",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Refuses an experiment without held-out prompts or a model, then scores on ranks. Raises UserError."""
    settings = typed_settings(arguments)
    overrides = [f"layout.{name}={json.dumps(value)}" for name, value in settings.items()]
    loaded = read_arguments(arguments, *overrides)
    num_ranks = world_size(loaded, arguments.nproc)
    config = loaded.config
    # Of the flag nothing is typed where it is missing; it is what --tp then asks for.
    missing = {"sequence_parallel"} if "tp" in settings and not config.layout.sequence_parallel else set()
    raise_errors(as_options(check_evaluation(config, num_ranks), {*settings, *missing}), loaded.locations)
    if not config.data.has_val_files:
        raise ConfigError(
            "data.val_files: is empty, and there is nothing to evaluate on; for example [data/test.jsonl]"
        )
    if arguments.model is not None:
        existing_folder("--model", arguments.model)
    elif readable_checkpoint(checkpoint_folder(config)) is None:
        raise ConfigError(
            f"trainer.run_dir: {config.trainer.run_dir} has no checkpoint to evaluate; name a model with --model PATH"
        )
    request = EvaluateRequest(config=config, model=arguments.model, layout_options=tuple(settings))
    return run_on_ranks(request, num_ranks, num_threads=config.trainer.num_threads)
