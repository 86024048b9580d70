"""Starts CPU ranks of one program as torchrun does, but imports once and forks: importing is most of a short run.

    python -m tests.support.fork_ranks NPROC MODULE ARGUMENTS…

Ends with 1 as soon as a rank fails, and the other ranks with it.
"""

import os
import runpy
import signal
import struct
import sys
from importlib import import_module

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

from torch.distributed import TCPStore

from tests.support.ranks import meeting_environment

PORT = struct.Struct("i")


def main() -> int:
    num_ranks, module = int(sys.argv[1]), sys.argv[2]
    sys.argv = [module, *sys.argv[3:]]
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


def run_rank(rank: int, num_ranks: int, port: int, module: str) -> None:
    """The program as `__main__`, then the end of this process, whatever happens."""
    os.environ |= meeting_environment(rank, num_ranks, port)
    code = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  a copy of the parent must never go on as the parent
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
