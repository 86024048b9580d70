"""What a checkpoint holds, read without the ranks that wrote it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def saved_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """The whole tensors of every role: weights and optimizer state, as role/key."""
    found: dict[str, Tensor] = {}
    for metadata in sorted(checkpoint.glob("*/.metadata")):
        with tempfile.NamedTemporaryFile(suffix=".pt") as file:
            dcp_to_torch_save(metadata.parent, file.name)
            state = torch.load(file.name, weights_only=False)
        found |= {f"{metadata.parent.name}/{key}": tensor for key, tensor in _flat(state)}
    return found


def same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Whether both have the same tensors, at least one, of the same bits."""
    return ours.keys() == theirs.keys() and bool(ours) and all(torch.equal(ours[key], theirs[key]) for key in ours)


def _flat(state: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        yield prefix, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from _flat(value, f"{prefix}/{key}" if prefix else str(key))
