"""How many ranks the tests on GPUs may have."""

import torch

from megappo.config.shared_gpus import ranks_per_gpu


def num_gpu_ranks() -> int:
    """One a GPU of this machine, or as many as MEGAPPO_RANKS_PER_GPU says."""
    return torch.cuda.device_count() * ranks_per_gpu() if torch.cuda.is_available() else 0
