"""What is said of a rank that is gone while weights move: the same on every way, and on a GPU too."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

PATIENCE = 0.9
"""Part of a group's time limit after which a switch gives up: NCCL's watchdog ends the process at the whole of it."""
_POLL_SECONDS = 5e-5


class SwitchError(RuntimeError):
    """The weights could not be moved: a rank was lost, or did not answer in time. They are unusable until sent anew."""


@contextmanager
def lost_ranks_named(what: str) -> Iterator[None]:
    """Makes errors of communication, while inside, SwitchErrors that say how far the switch was."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise  # no other rank's fault; it says itself how much was asked for
    except (RuntimeError, ValueError) as error:
        raise SwitchError(
            f"the weights could not be moved to the generation layout: {what} failed, a rank is gone or did not answer "
            f"in time ({error})"
        ) from error


def await_device(requests: Sequence[dist.Work], limit: float) -> None:
    """Returns when the GPU is done with the requests; RuntimeError where it is not within `limit` seconds.

    With NCCL `wait` lets the GPU's streams wait, and returns at once: without this, a program that goes on and
    synchronises with its GPU never comes back where a rank is gone.
    """
    end = time.monotonic() + limit
    while not all(request.is_completed() for request in requests):
        if time.monotonic() > end:
            raise RuntimeError(f"not done after {limit:g} s")
        time.sleep(_POLL_SECONDS)


def time_limit(group: ProcessGroup | None, device: torch.device) -> float:
    """Seconds that a switch waits for a group that communicates on `device`, a GPU."""
    backend = (group or dist.distributed_c10d._get_default_group())._get_backend(device)
    return PATIENCE * float(backend.options._timeout.total_seconds())
