"""The folder that an export writes: beside its name until it is complete, then in the place of an earlier one."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megappo.config.checkpoint_names import MARKS, partial_of, put_in_place
from megappo.errors import DataError
from megappo.observe.run_folder import replace_file
from megappo.parallel.collectives import any_rank
from megappo.parallel.mesh import Mesh


def begin_folder(out: Path, mesh: Mesh, *, replaces: bool) -> Path:
    """An empty folder to write into, seen by all ranks. DataError, on every rank, where `out` exists and is not empty,
    unless the export `replaces` it."""
    is_taken = mesh.is_writer and out.exists() and (not out.is_dir() or any(out.iterdir()))
    if any_rank(is_taken and not replaces, mesh):
        raise DataError(f"{out}: exists and is not empty; give a new folder, or remove this one first")
    partial = partial_of(out)
    if mesh.is_writer:
        shutil.rmtree(partial, ignore_errors=True)  # of an export that was stopped
        partial.mkdir(parents=True)
    if mesh.world_size > 1:
        dist.barrier()
    return partial


def end_folder(out: Path, mesh: Mesh, mark: str, content: Mapping[str, Any]) -> None:
    """Writes the JSON file `mark`, with which the folder that `begin_folder` made is complete, and gives it its name.
    Every rank of the mesh calls it; `content` counts on the writer."""
    if mesh.is_writer:
        assert mark in MARKS, "a reader knows a complete folder by its mark"
        replace_file(partial_of(out) / mark, json.dumps(content, indent=2) + "\n")
        put_in_place(partial_of(out), out)
    if mesh.world_size > 1:
        dist.barrier()
