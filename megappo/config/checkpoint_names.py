"""The names of checkpoint folders: how a complete one gets its own, how one is removed, and what a kill leaves of both.

Not here: what is in them (`trainer/checkpoint.py`), and which of them a run goes on from (`checkpoint_folder.py`).
"""

import os
import shutil
from pathlib import Path

from megappo.config.checkpoint_folder import MANIFEST, read_part
from megappo.errors import DataError

PARTIAL = ".partial"
"""Ends the name of a checkpoint that is being written."""
OLD = ".old"
"""Ends the name of one that is being removed, or that another one takes the name of."""


def put_in_place(partial: Path, target: Path) -> None:
    """Gives the complete folder `partial` the name `target`. A checkpoint of that name steps aside first and is removed
    last: at any moment one of the two is complete."""
    is_taken = target.is_dir() and any(target.iterdir())
    if is_taken:
        os.replace(target, target.with_name(target.name + OLD))
    os.replace(partial, target)
    if is_taken:
        _remove(target.with_name(target.name + OLD))


def remove_checkpoint(path: Path) -> None:
    """Removes a complete checkpoint; a part of it never stands under its name."""
    old = path.with_name(path.name + OLD)
    os.replace(path, old)
    (old / MANIFEST).unlink()  # first: `finish_interrupted` would take it for one that stepped aside
    _remove(old)


def finish_interrupted(folder: Path) -> None:
    """Gives their names back to complete checkpoints in `folder` that a kill left without: the new one, else the one
    that had stepped aside for it."""
    for suffix in (PARTIAL, OLD):
        for path in _left(folder, suffix):
            target = path.with_name(path.name.removesuffix(suffix))
            if not (target / MANIFEST).is_file() and _is_whole(path):
                shutil.rmtree(target, ignore_errors=True)  # earlier versions removed an old checkpoint under its name
                os.replace(path, target)


def remove_left_over(folder: Path) -> None:
    """Removes what kills left in `folder` of checkpoints that were being written or removed, complete ones excepted
    that have no other copy. For the time before a save, when nobody writes there."""
    finish_interrupted(folder)
    for suffix in (PARTIAL, OLD):
        for path in _left(folder, suffix):
            _remove(path)


def _left(folder: Path, suffix: str) -> list[Path]:
    """Folders `step-NNNNNN` with `suffix`: others are somebody else's."""
    found = folder.glob(f"step-*{suffix}")
    return sorted(path for path in found if path.name.removesuffix(suffix)[len("step-") :].isdigit())


def _is_whole(path: Path) -> bool:
    """Whether all files are there in their sizes; their checksums are compared where the checkpoint is loaded."""
    try:
        manifest = read_part(path, MANIFEST)
    except DataError:  # none, or one that was being written
        return False
    return all((path / name).is_file() and (path / name).stat().st_size == size for name, (size, _) in manifest.items())


def _remove(path: Path) -> None:
    # What can't be removed now (NFS keeps files that are open) is in nobody's way: the next save tries again.
    shutil.rmtree(path, ignore_errors=True)
