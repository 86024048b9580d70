"""Starts CPU ranks of one program as torchrun does, but imports once and forks."""

import os
import runpy
import signal
import struct
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from torch.distributed import TCPStore

from tests.support.ranks import meeting_environment

PORT = struct.Struct("i")


def start(num_ranks: int, module: str, arguments: Sequence[str]) -> int:
    """Runs `python -m module arguments` on all ranks. Returns 1 as soon as a rank fails, having ended the others."""
    sys.argv = [module, *arguments]
    import_module(module)
    told, tell = os.pipe()
    ranks = {}
    for rank in range(num_ranks):
        child = os.fork()
        if not child:
            (port,) = PORT.unpack(os.read(told, PORT.size))
            run_rank(rank, num_ranks, port, module)
        ranks[child] = rank
    # After the forks: the store answers in a thread, whose locks a copy of this process would hold for ever.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(tell, PORT.pack(store.port) * num_ranks)
    while ranks:
        child, status = os.wait()
        rank = ranks.pop(child)
        if status:
            print(f"rank {rank} ended with status {os.waitstatus_to_exitcode(status)}", file=sys.stderr, flush=True)
            for other in ranks:
                os.kill(other, signal.SIGKILL)
            return 1
    return 0


def run_rank(rank: int, num_ranks: int, port: int, module: str) -> NoReturn:
    """The program as `__main__`, then the end of this process."""
    os.environ |= meeting_environment(rank, num_ranks, port)

    def program() -> int:
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else int(end.code is not None)
        return 0

    end_with(program)


def end_with(work: Callable[[], int]) -> NoReturn:
    """Ends this process with the code that `work` returns, and with 1 whatever else happens: a copy of its parent must
    never go on as the parent."""
    code = 1
    try:
        code = work()
    except BaseException:  # noqa: BLE001  told here, for nobody else does
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
