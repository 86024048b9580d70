"""How many ranks to start on this machine."""

import os

from megappo.config.layout import LayoutConfig
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
    """Ranks to start: `nproc`, else tp · pp · cp · dp, else one for each GPU, else one copy of the model
    with all its experts.

    Raises ConfigError where there are GPUs, but fewer than ranks.
    """
    if nproc is not None:
        world_size = nproc
    elif layout.dp is not None:
        world_size = layout.model_parallel_size * layout.dp
    else:
        world_size = max(num_gpus, layout.model_parallel_size * layout.fewest_copies)
    if num_gpus and world_size > num_gpus:
        origin = f"--nproc {nproc}" if nproc is not None else f"layout {layout.product()} · dp {layout.dp or 1}"
        raise ConfigError(
            f"{origin}: needs {world_size} ranks, and this machine has {num_gpus} GPUs; start at most {num_gpus}, "
            "use more machines (launch/torchrun.sh, launch/slurm.sbatch), or set CUDA_VISIBLE_DEVICES= to run on CPUs"
        )
    return world_size
