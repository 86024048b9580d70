"""Imports once for a whole pytest process, and forks for each call of `run_ranks`: importing is most of a short run.

    python -m tests.support.fork_server FD

Reads a request a line, JSON `[number of ranks, module, arguments, file of the output]`, and answers with two lines in
FD, which no library prints to: the process that it has forked, and, when that has ended, its exit code. Ends with its
input.
"""

import functools
import json
import os
import sys

import megappo.parallel.runtime  # isort: skip  before megatron

from transformers import AutoTokenizer  # noqa: F401  what programs import when they read a tokenizer

import megappo.trainer.build  # noqa: F401
from tests.support import fork_ranks


def main() -> None:
    answers = int(sys.argv[1])
    for line in sys.stdin:
        child = os.fork()
        if not child:
            fork_ranks.end_with(functools.partial(run, *json.loads(line)))
        os.write(answers, b"%d\n" % child)
        _, status = os.waitpid(child, 0)
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(status))


def run(num_ranks: int, module: str, arguments: list[str], output: str) -> int:
    """In a session of its own, which prints into the file; the exit code."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    return fork_ranks.start(num_ranks, module, arguments)


if __name__ == "__main__":
    main()
