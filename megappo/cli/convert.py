"""`megappo convert`: Hugging Face folder to checkpoint and back."""

import argparse
from pathlib import Path

from megappo.cli.model_arguments import (
    add_base,
    add_dtype,
    add_layout,
    checked_layout,
    existing_folder,
    model_facts,
    typed_settings,
)
from megappo.config.checkpoint_names import MANIFEST, readable
from megappo.config.layout import LayoutConfig
from megappo.config.requests import ConvertRequest
from megappo.errors import ConfigError, ExitCode
from megappo.launcher.start import run_on_ranks


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `megappo convert` with its options."""
    parser = commands.add_parser(
        "convert",
        help="Hugging Face folder to checkpoint, or back",
        description="Reads a Hugging Face folder or a checkpoint, and writes the other.",
        epilog="example: megappo convert --from models/demo --to models/checkpoint --tp 2",
    )
    parser.add_argument("--from", dest="source", required=True, metavar="PATH", help="what is read")
    parser.add_argument("--to", dest="target", required=True, metavar="PATH", help="folder that is written")
    add_dtype(parser)
    add_base(parser)
    parser.add_argument("--merged", action="store_true", help="write the whole model, low-rank adapters merged into it")
    add_layout(
        parser,
        dp="copies of the dense weights, which share the experts (default: the fewest that hold all experts)",
        runs_model=False,
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Refuses what can't be converted, then converts on ranks of its own. Raises UserError."""
    facts = model_facts("--from", arguments.source)
    if arguments.base is not None:
        existing_folder("--base", arguments.base)
        if not arguments.merged:
            raise ConfigError(f"--base {arguments.base}: is only read with --merged; add that, or leave it out")
    if arguments.merged and is_hf_folder(readable(arguments.source)):
        raise ConfigError(
            f"--merged: {arguments.source} is a Hugging Face folder, which has no adapters to merge; leave it out"
        )
    typed = LayoutConfig.model_validate(typed_settings(arguments))
    layout, num_ranks = checked_layout(arguments.source, facts, typed)
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
        layout=layout,
        dtype=arguments.dtype,
        merged=arguments.merged,
        base=arguments.base,
    )
    return run_on_ranks(request, num_ranks)


def is_hf_folder(folder: Path) -> bool:
    """Whether it is one of a whole model, and no checkpoint, whose configuration lies deeper."""
    return (folder / "config.json").is_file() and not (folder / MANIFEST).exists()
