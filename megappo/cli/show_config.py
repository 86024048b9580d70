"""`megappo show-config FILE`: the experiment with bases, overrides and defaults resolved, as YAML."""

import argparse

from megappo.cli.experiment import add_experiment, read_arguments
from megappo.config.load import to_yaml
from megappo.errors import ExitCode


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "show-config",
        help="print the resolved experiment file",
        description="Prints the experiment with every default written out.",
        epilog="example: megappo show-config yaml/demo_cpu.yaml",
    )
    add_experiment(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitCode:
    """Prints the experiment; nothing is checked but names and types. Raises ConfigError."""
    print(to_yaml(read_arguments(arguments).config), end="")
    return ExitCode.DONE
