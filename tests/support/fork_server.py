"""Imports once for a whole pytest process, and forks for each call of `run_ranks`: importing is most of a short run.

    python -m tests.support.fork_server FD

Reads a request a line, JSON `[number of ranks, module, arguments, file of the output]`, and answers with two lines in
FD, which no library prints to: the process that it has forked, and, when that has ended, its exit code. Ends with its
input.
"""

import json
import os
import sys
from typing import Any

import megappo.parallel.runtime  # isort: skip  before megatron

from transformers import AutoTokenizer  # noqa: F401  what nearly all programs import, this too

import megappo.trainer.build  # noqa: F401
from tests.support import fork_ranks


def main() -> None:
    answers = int(sys.argv[1])
    for line in sys.stdin:
        child = os.fork()
        if not child:
            run(*json.loads(line))
        os.write(answers, b"%d\n" % child)
        _, status = os.waitpid(child, 0)
        os.write(answers, b"%d\n" % os.waitstatus_to_exitcode(status))


def run(num_ranks: int, module: str, arguments: list[Any], output: str) -> None:
    """In a session of its own, as `fork_ranks` does it; then the end of this process, whatever happens."""
    code = 1
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        code = fork_ranks.start(num_ranks, module, arguments)
    except BaseException:  # noqa: BLE001  a copy of the server must never go on as the server
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
