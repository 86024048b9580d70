"""`megappo convert`: Hugging Face folder to checkpoint and back."""

import argparse
from pathlib import Path

from megappo.cli.model_arguments import add_layout, check_layout
from megappo.config.load import load_experiment
from megappo.config.requests import ConvertRequest
from megappo.errors import ConfigError, ExitCode
from megappo.launcher.start import run_on_ranks


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `megappo convert` with its options."""
    parser = commands.add_parser("convert", help="Hugging Face folder to checkpoint, or back")
    parser.add_argument("--from", dest="source", required=True, metavar="PATH", help="what is read")
    parser.add_argument("--to", dest="target", required=True, metavar="PATH", help="folder that is written")
    parser.add_argument("--config", metavar="FILE", help="experiment of the checkpoint, where its run folder lacks it")
    add_layout(parser)
    parser.add_argument("--merged", action="store_true", help="write the whole model, low-rank adapters merged into it")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Refuses what can't be converted, then converts on ranks of its own. Raises UserError."""
    check_layout("--from", arguments.source, arguments.tp, arguments.pp)
    target = Path(arguments.target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"--to {target}: exists and is not empty; give a new folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--to {target}: can't be made ({error.strerror}: {error.filename}); give another") from None
    request = ConvertRequest(
        source=arguments.source,
        target=arguments.target,
        config=load_experiment(arguments.config) if arguments.config else None,
        tp=arguments.tp,
        pp=arguments.pp,
        dtype=arguments.dtype,
        merged=arguments.merged,
    )
    return run_on_ranks(request, arguments.tp * arguments.pp)
