"""The `megappo` command: picks the sub-command, and turns a user's mistake into one message and exit code 2."""

import argparse
import os
import sys
from collections.abc import Sequence

from megappo import __version__
from megappo.cli import convert, evaluate, generate, show_config, train, validate
from megappo.errors import ExitCode, UserError
from megappo.launcher.environment import is_joined, own_rank, own_task
from megappo.launcher.failure import Failure
from megappo.launcher.rank import report_failure


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line; returns its exit code (argparse itself exits with 2)."""
    parsed = parse(arguments)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # reward functions lie in the user's folder, as with `python -m megappo`
    try:
        code: ExitCode = parsed.run(parsed)
    except UserError as error:
        if is_joined():
            report_failure(Failure.of(error, own_rank()))
        elif own_task() == 0:
            print(f"error: {error}", file=sys.stderr)
        return ExitCode.BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return ExitCode.FAILED
    return code


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Like `parse_args`, but overrides may also come after options: `train FILE --nproc 2 a.b=c`."""
    parser = build_parser()
    parsed, rest = parser.parse_known_args(arguments)
    unknown = [word for word in rest if word.startswith("-") or not hasattr(parsed, "overrides")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        parsed.overrides = [*parsed.overrides, *rest]
    return parsed


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; each sets `run`, the function that carries it out."""
    parser = argparse.ArgumentParser(
        prog="megappo",
        description="PPO for language models on Megatron shards.",
        epilog="exit codes: 0 done, 2 bad configuration or input, 75 stopped on a signal after saving, 1 anything else",
    )
    parser.add_argument("--version", action="version", version=f"megappo {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (train, validate, show_config, evaluate, generate, convert):
        command.add_parser(commands)
    return parser
