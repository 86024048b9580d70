"""Where the ranks that were started on this machine meet: at a socket that listens before the first of them starts.

A free port that is only looked for, and left to rank 0 to listen at, may be somebody else's by then: rank 0 needs
seconds until it has imported torch, and two runs that start at the same time look at the same ports. So the launcher
listens and rank 0 inherits the socket. This file imports no torch before ranks need it, for the launcher.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

MEETING_SOCKET = "MEGAPPO_MEETING_SOCKET"
"""Environment variable: the listening socket's number in rank 0. Other ranks know by it that rank 0 has one."""


@contextmanager
def listening() -> Iterator[socket.socket]:
    """A socket that this machine alone can reach, listening at a free port; closed at the end.

    Rank 0 is started within, with the socket's number in `pass_fds`. Once the socket is closed here, a rank whose
    rank 0 is gone finds nobody.
    """
    with socket.socket() as meeting:
        meeting.bind(("127.0.0.1", 0))
        meeting.listen()
        yield meeting


def meeting_store(timeout: timedelta) -> "TCPStore | None":
    """The store by which the ranks of this machine find each other; None where torchrun or srun have a place for it.

    A process that nobody started as a rank gets a store of its own, whose port it makes known as MASTER_PORT.

    Raises torch.distributed.DistStoreError where rank 0 does not answer within `timeout`.
    """
    from torch.distributed import TCPStore

    rank, address = int(os.environ["RANK"]), os.environ["MASTER_ADDR"]
    if "MASTER_PORT" not in os.environ:
        store = TCPStore(address, 0, 1, is_master=True, timeout=timeout, multi_tenant=True)
        os.environ["MASTER_PORT"] = str(store.port)
        return store
    if MEETING_SOCKET not in os.environ:
        return None
    number = None
    if rank == 0:
        number = int(os.environ[MEETING_SOCKET])
        os.set_inheritable(number, False)  # what rank 0 starts has no part in it
    return TCPStore(
        address,
        int(os.environ["MASTER_PORT"]),
        int(os.environ["WORLD_SIZE"]),
        is_master=rank == 0,
        timeout=timeout,
        multi_tenant=True,  # whoever calls torch's env:// in rank 0 later gets this server, not a second one
        master_listen_fd=number,
    )
