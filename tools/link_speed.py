"""What the link between the ranks of a machine gives, and how long something takes on the slowest of them."""

import math
import statistics
import time
from collections.abc import Callable

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

import torch
import torch.distributed as dist

from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import Mesh

LINK_BYTES = 16 * 2**20


def link_text(world_size: int, link: float, speed: float) -> str:
    """What the share of the link compares."""
    if world_size == 1:
        return "link: none, with one rank"
    return (
        f"link: {link / 1e9:.2f} GB/s into each rank while all {world_size} send one large message to the next rank "
        f"and take one from the rank before; the switch's {speed / 1e9:.2f} GB/s, copies and all, are "
        f"{speed / link:.2f} of that"
    )


def link_speed(mesh: Mesh, repeats: int) -> float:
    """Bytes a second into each rank while all send to their neighbour at once, in large messages; median."""
    size = LINK_BYTES if runtime.on_cpu else 16 * LINK_BYTES
    given, taken = (torch.zeros(size, dtype=torch.uint8, device=mesh.device) for _ in range(2))
    after, before = (mesh.rank + 1) % mesh.world_size, (mesh.rank - 1) % mesh.world_size

    def exchange() -> None:
        both = [dist.P2POp(dist.isend, given, after), dist.P2POp(dist.irecv, taken, before)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    if mesh.world_size == 1:
        return math.inf
    exchange()
    return size / statistics.median(timed(exchange, mesh) for _ in range(repeats))


def timed(run: Callable[[], object], mesh: Mesh) -> float:
    """Seconds until the slowest rank is done."""
    synchronize()
    dist.barrier()
    start = time.perf_counter()
    run()
    synchronize()
    return max(gather_objects(time.perf_counter() - start, mesh.world_group))


def synchronize() -> None:
    if not runtime.on_cpu:
        torch.cuda.synchronize()
