"""The names of folders that are complete or absent, checkpoints and exported models: how one gets its name, how it is
removed, what a kill leaves of both, and where a reader finds it then.

Not here: what is in them (`trainer/checkpoint.py`, `models/export_hf.py`), and which checkpoint a run goes on from
(`checkpoint_folder.py`).
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

MANIFEST = "manifest.json"
"""Written last into a checkpoint: size and checksum of every other file."""
MARKS = (MANIFEST, "config.json", "adapter_config.json")
"""Of a checkpoint, a whole model and adapters the file that is written last and removed first: without it the folder
is not complete."""
LATEST = "latest"
"""The link to the newest of a run's checkpoints, and of its exports."""
PARTIAL = ".partial"
"""Ends the name of a folder that is being written."""
OLD = ".old"
"""Ends the name of one that is being removed, or that another one takes the name of."""


def partial_of(target: Path) -> Path:
    """Where the folder `target` is written until it is complete."""
    return target.with_name(target.name + PARTIAL)


def put_in_place(partial: Path, target: Path) -> None:
    """Gives the complete folder `partial` the name `target`. A folder of that name steps aside first and is removed
    last: at any moment one of the two is complete."""
    is_taken = target.is_dir() and any(target.iterdir())
    if is_taken:
        os.replace(target, target.with_name(target.name + OLD))
    os.replace(partial, target)
    if is_taken:
        _remove(target.with_name(target.name + OLD))


def remove_folder(path: Path) -> None:
    """Removes a complete folder; a part of it never stands under its name, nor counts for one that stepped aside."""
    old = path.with_name(path.name + OLD)
    os.replace(path, old)
    _remove(old)


def readable(path: str | Path) -> Path:
    """The complete folder that `path` names: itself, or the copy that a kill between two names has left without one.
    `latest`, where it leads nowhere, stands for the newest folder beside it. What is found nowhere stays `path`.

    Nothing gets its name back here, for the run that the folder belongs to may be writing it.
    """
    path = Path(path)
    if is_complete(path):
        return path
    found = next(_nameless(Path(os.path.realpath(path))), None)
    if found is None and path.name == LATEST:
        found = max(map(readable, _steps(path.parent)), key=_written, default=None)
    return path if found is None or not is_complete(found) else found


def is_complete(path: Path) -> bool:
    """Whether the folder has what is written last."""
    return any((path / mark).is_file() for mark in MARKS)


def finish_interrupted(folder: Path) -> None:
    """Gives their names back to complete folders in `folder` that a kill left without: the new one, else the one that
    had stepped aside for it."""
    for target in _steps(folder):
        copy = next(_nameless(target), None)
        if copy is not None and not is_complete(target):
            shutil.rmtree(target, ignore_errors=True)  # earlier versions removed an old folder under its name
            os.replace(copy, target)


def remove_left_over(folder: Path) -> None:
    """Removes what kills left in `folder` of folders that were being written or removed, complete ones excepted that
    have no other copy. For the time before a save, when nobody writes there."""
    finish_interrupted(folder)
    for target in _steps(folder):
        for path in _beside(target):
            _remove(path)


def _steps(folder: Path) -> list[Path]:
    """`folder`/step-NNNNNN of every step that has a folder, with its name or without: others are somebody else's."""
    names = {path.name.removesuffix(PARTIAL).removesuffix(OLD) for path in folder.glob("step-*")}
    return [folder / name for name in sorted(names) if _is_step(name)]


def _is_step(name: str) -> bool:
    return name.startswith("step-") and name.removeprefix("step-").isdigit()


def _beside(target: Path) -> Iterator[Path]:
    """The folders beside a step's own, the newer one first."""
    if _is_step(target.name):
        copies = (target.with_name(target.name + suffix) for suffix in (PARTIAL, OLD))
        yield from (copy for copy in copies if copy.is_dir())


def _nameless(target: Path) -> Iterator[Path]:
    """The complete ones of them. Of a checkpoint all files have to be there in their sizes; their checksums are
    compared where it is loaded."""
    return (copy for copy in _beside(target) if is_complete(copy) and _has_its_sizes(copy))


def _has_its_sizes(path: Path) -> bool:
    """Whether the files of a checkpoint are as long as its manifest says; True for what is no checkpoint."""
    if not (path / MANIFEST).is_file():
        return True
    try:
        sizes = {name: size for name, (size, _) in json.loads((path / MANIFEST).read_text(encoding="utf-8")).items()}
    except (OSError, ValueError, AttributeError, TypeError):  # cut, for it was being written; or gone by now
        return False
    return all((path / name).is_file() and (path / name).stat().st_size == size for name, size in sizes.items())


def _written(path: Path) -> tuple[int, str]:
    """Sorts folders by the time at which they were complete; those that are not come first."""
    time = 0
    for mark in MARKS:
        with contextlib.suppress(OSError):
            time = max(time, (path / mark).stat().st_mtime_ns)
    return time, path.name


def _remove(path: Path) -> None:
    for mark in MARKS:  # first: what is left of the folder would be taken for one that stepped aside
        with contextlib.suppress(OSError):
            (path / mark).unlink()
    # What can't be removed now (NFS keeps files that are open) is in nobody's way: the next save tries again.
    shutil.rmtree(path, ignore_errors=True)
