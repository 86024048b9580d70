"""The GPU that a rank computes on: its own, or, where that is asked for, one that other ranks compute on too."""

import os
import socket

import torch

from megappo.config.shared_gpus import RANKS_PER_GPU, ranks_per_gpu
from megappo.errors import ConfigError


def take_gpu() -> None:
    """Makes a GPU torch's current one: that of this rank's LOCAL_RANK, where a machine's ranks are dealt to its GPUs.

    NCCL refuses two ranks of one machine on a GPU, so that where they may share one each passes for a machine of its
    own: they reach each other through sockets, far slower than through NVLink. Raises ConfigError on all ranks of a
    machine that are more than its GPUs take.
    """
    local_rank, num_gpus, most = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count(), ranks_per_gpu()
    num_ranks = max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    if num_ranks > most * num_gpus:
        raise ConfigError(
            f"{num_ranks} ranks on this machine, but {num_gpus} visible GPUs for {most} each; start one rank a "
            "GPU, and let every rank see all GPUs (Slurm: --gpus-per-node, not --gpus-per-task), or, to try a layout "
            f"with several ranks on a GPU, set {RANKS_PER_GPU} to {-(-num_ranks // num_gpus)}"
        )
    if most > 1:
        local_rank %= num_gpus
        os.environ["LOCAL_RANK"] = str(local_rank)  # where vLLM looks
        os.environ["NCCL_HOSTID"] = f"{socket.gethostname()}-{os.environ['RANK']}"
        if int(os.environ["WORLD_SIZE"]) <= num_ranks:  # no other machine has to be reached
            os.environ.setdefault("NCCL_NET", "Socket")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(local_rank)
