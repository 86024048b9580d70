"""How many ranks to start on this machine."""

import os

from megappo.config.layout import LayoutConfig
from megappo.config.shared_gpus import RANKS_PER_GPU, ranks_per_gpu
from megappo.errors import ConfigError


def count_gpus() -> int:
    """NVIDIA GPUs that this process may use; asks the driver, so that torch need not be imported."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA stops reading the list at the first name that is none.
        return next((index for index, name in enumerate(names) if name in ("", "-1")), len(names))
    import pynvml  # here: it takes longer to import than all else of the command line together

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver: a machine without GPUs
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()


def local_world_size(layout: LayoutConfig, nproc: int | None, num_gpus: int) -> int:
    """Ranks to start: `nproc`, else tp · pp · cp · dp, else as many as the GPUs take, one each unless
    MEGAPPO_RANKS_PER_GPU says otherwise, else one copy of the model with all its experts.

    Raises ConfigError where there are GPUs, but too few for the ranks.
    """
    most = num_gpus * ranks_per_gpu()
    if nproc is not None:
        world_size = nproc
    elif layout.dp is not None:
        world_size = layout.model_parallel_size * layout.dp
    else:
        world_size = max(most, layout.model_parallel_size * layout.fewest_copies)
    if num_gpus and world_size > most:
        origin = f"--nproc {nproc}" if nproc is not None else f"layout {layout.product()} · dp {layout.dp or 1}"
        raise ConfigError(
            f"{origin}: needs {world_size} ranks, and this machine has {num_gpus} GPUs; start at most {most}, "
            f"use more machines (launch/torchrun.sh, launch/slurm.sbatch), set {RANKS_PER_GPU} to try a layout with "
            "several ranks on a GPU, or CUDA_VISIBLE_DEVICES= to run on CPUs"
        )
    return world_size
