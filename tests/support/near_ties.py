"""Models with experts between which rounding chooses."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

FLOAT32, BFLOAT16 = 1e-7, 2**-8
"""Of a router's weights; experts differ by that much where rounding of this type decides between them."""


def with_near_ties(folder: Path, size: float = FLOAT32) -> Path:
    """Every expert's row in a router is the first one's but for `size` of it, and biases are zero, so that rounding
    chooses between them."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(0)
    for name, rows in tensors.items():
        if name.endswith("mlp.gate.weight"):
            noise = torch.randn(rows.shape, generator=generator)
            rows[:] = (rows[:1].float() * (1 + size * noise)).to(rows.dtype)
        elif name.endswith("e_score_correction_bias"):
            rows.zero_()
    save_file(tensors, file, {"format": "pt"})
    return folder
