"""Comparing training runs on different layouts, tensor by tensor in Hugging Face names."""

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor


@dataclass(frozen=True)
class Difference:
    """The largest ‖a − b‖ / ‖b‖ over the tensors of two folders, and where it stands."""

    relative: float
    tensor: str


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder, in float64."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118  safe_open is no mapping
                tensors[name] = reader.get_tensor(name).double()
    return tensors


def largest_difference(folder: Path, reference: Path, origin: Path | None = None) -> Difference:
    """Of `folder` against `reference`; with `origin`, of what changed since: ‖Δ − Δ₁‖ / ‖Δ₁‖.

    A tensor that is zero (or unchanged) in the reference must be so in the folder too.
    """
    ours, theirs = read_folder(folder), read_folder(reference)
    assert ours.keys() == theirs.keys(), (
        f"{folder} and {reference} hold different tensors: {ours.keys() ^ theirs.keys()}"
    )
    start = read_folder(origin) if origin is not None else {}
    worst = Difference(0.0, "none")
    for name, expected in theirs.items():
        moved = expected - start.get(name, torch.zeros_like(expected))
        error, size = float((ours[name] - expected).norm()), float(moved.norm())
        relative = error / size if size else (0.0 if error == 0.0 else float("inf"))
        if relative > worst.relative:
            worst = Difference(relative, name)
    return worst
