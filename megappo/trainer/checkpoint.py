"""Checkpoints: folders that hold every trained role, the loop's own state, random states, and checksums of it all.

A folder `step-000010` is complete or absent: it is written beside its name, checksummed, and renamed last
(checkpoint_names.py). Not here: Megatron's tensors of a role (saved_role.py), Hugging Face folders
(models/import_hf.py, models/export_hf.py).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
import torch.distributed as dist

from megappo.config.checkpoint_folder import (
    BEST,
    EVALUATION,
    MODEL_FILES,
    STATE,
    check_same_model,
    complete_checkpoints,
    damaged,
    read_part,
    read_state,
    signature,
)
from megappo.config.checkpoint_names import (
    LATEST,
    MANIFEST,
    partial_of,
    put_in_place,
    remove_folder,
    remove_left_over,
)
from megappo.config.model_folder import read_model_facts
from megappo.errors import DataError
from megappo.models.build import ModelSpec
from megappo.models.hf_folder import copy_companions
from megappo.observe.run_folder import replace_file
from megappo.parallel.collectives import broadcast_object, gather_objects
from megappo.parallel.mesh import Mesh
from megappo.trainer.frozen_weights import FrozenWeights
from megappo.trainer.saved_role import SavedRole, adapters_of, check_same_adapters, load_role, save_role


@dataclass(frozen=True)
class LoopState:
    """What the loop itself needs to go on: JSON values only."""

    step: int
    data: dict[str, Any]
    kl_controller: dict[str, Any] | None
    seed: int
    best: dict[str, Any] | None = None
    unreported: dict[str, float] | None = None
    """The step's metrics, where the evaluation that is reported with them is still to come."""


class SavedFile(Protocol):
    """A part of the loop that has a file of its own in a checkpoint, the same on every rank."""

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...


class CheckpointStore:
    """The checkpoints of one run, in `folder`. Every method is a collective over all ranks."""

    def __init__(self, folder: Path, mesh: Mesh, spec: ModelSpec, tokenizer_folder: Path, *, keep: int | None) -> None:
        self._folder = folder
        self._mesh = mesh
        self._spec = spec
        self._tokenizer_folder = tokenizer_folder
        self._keep = keep

    def save(
        self, roles: Mapping[str, SavedRole], state: LoopState, files: Mapping[str, SavedFile] | None = None
    ) -> Path:
        """Writes `step-NNNNNN` and points `latest` to it; returns its path."""
        target = self._folder / f"step-{state.step:06d}"
        if self._mesh.is_writer:
            remove_left_over(self._folder)
        write_checkpoint(target, roles, state, self._mesh, self._spec, self._tokenizer_folder, files)
        if self._mesh.is_writer:
            point_to(self._folder / LATEST, target)
            self._remove_old()
        dist.barrier()
        return target

    def mark_best(self, step: int) -> None:
        """Points `best` to the checkpoint of `step`, which is then kept whatever its age."""
        if self._mesh.is_writer:
            point_to(self._folder / BEST, self._folder / f"step-{step:06d}")
        dist.barrier()

    def restore_best(self, loaded: Path, step: int | None) -> None:
        """Points `best` to the checkpoint of `step`, which was the best one when `loaded` was saved. Where this folder
        does not hold it the link goes: after a return to an older checkpoint it leads to one of the course given up."""
        if self._mesh.is_writer:
            is_own = loaded.resolve().parent == self._folder.resolve()
            target = self._folder / f"step-{step:06d}" if step is not None else None
            if is_own and target is not None and (target / MANIFEST).is_file():
                point_to(self._folder / BEST, target)
            else:
                (self._folder / BEST).unlink(missing_ok=True)
        dist.barrier()

    def note_evaluation(self, step: int, best: dict[str, Any] | None) -> None:
        """Adds to the checkpoint of `step` that the evaluation after it is done and reported."""
        if self._mesh.is_writer:
            replace_file(self._folder / f"step-{step:06d}" / EVALUATION, json.dumps({"best": best}))
        dist.barrier()

    def load(
        self, path: Path, roles: Mapping[str, SavedRole], files: Mapping[str, SavedFile] | None = None
    ) -> LoopState:
        """Loads weights, optimizers and random state from `path`; returns the loop's state.

        Raises DataError for a folder that is no complete checkpoint, is damaged, or is of another model.
        """
        saved = read_state(path)
        check_same_model(path, saved.pop("model"), str(self._spec.folder))
        check_files(path, self._mesh)
        saved.pop("dtype")
        check_same_adapters(path, saved.pop("lora", {}), roles)
        without_frozen = _same_frozen_weights(path, saved.pop("frozen", {}), roles)
        missing = [name for name in roles if not (path / name).is_dir()]
        if missing:
            raise DataError(
                f"{path}: this checkpoint holds no {missing[0]}; resume with the configuration that wrote it"
            )
        for name, role in roles.items():
            load_role(path / name, role, without_frozen=name in without_frozen)
        rng = path / "rng" / f"rank-{self._mesh.rank:05d}.pt"
        if rng.exists():  # absent where the layout has more ranks now; sampling noise does not depend on it
            restore_random_state(torch.load(rng, weights_only=False))
        for name, part in (files or {}).items():
            if (path / name).exists():  # absent where the run that saved had no such part
                part.load(path / name)
        return self._with_evaluation(path, LoopState(**saved))

    def _with_evaluation(self, path: Path, state: LoopState) -> LoopState:
        """The state, with what was noted of an evaluation after it. A collective call."""
        # One rank looks: on a shared file system the others may not see yet what was added to the checkpoint.
        noted = broadcast_object(_noted(path) if self._mesh.is_writer else None, self._mesh.world_group, 0)
        return state if noted is None else replace(state, best=noted["best"], unreported=None)

    def _remove_old(self) -> None:
        if self._keep is not None:
            best = (self._folder / BEST).resolve()
            for old in complete_checkpoints(self._folder)[: -self._keep]:
                if old.resolve() != best:
                    remove_folder(old)


def _noted(path: Path) -> dict[str, Any] | None:
    """What `note_evaluation` wrote, None where it is missing, or cut by a crash: the evaluation is made again, then."""
    try:
        return read_part(path, EVALUATION)
    except DataError:
        return None


def _same_frozen_weights(path: Path, saved: Mapping[str, Any], roles: Mapping[str, SavedRole]) -> set[str]:
    """The roles of which the checkpoint holds no frozen weights; DataError where the run has others for one."""
    for name in (name for name in roles if name in saved):
        now = roles[name].frozen
        assert now is not None, "adapters were compared before"
        remedy = f"set {'critic.path' if name == 'critic' else 'model.path'} to a folder that holds them"
        FrozenWeights.from_json(saved[name]).check(now, f"{path / name}", remedy)
    return set(saved)


def check_files(path: Path, mesh: Mesh) -> None:
    """DataError, on every rank, where a file of the checkpoint is missing or damaged. A collective call."""
    expected = read_part(path, MANIFEST)
    for name in expected:
        if not (path / name).exists():
            raise DataError(f"{path}: the file {name} is missing; resume from another checkpoint")
    for name, value in checksums(path, sorted(expected), mesh).items():
        if list(value) != expected[name]:
            raise damaged(path, name)


def write_checkpoint(
    target: Path,
    roles: Mapping[str, SavedRole],
    state: LoopState,
    mesh: Mesh,
    spec: ModelSpec,
    tokenizer_folder: Path,
    files: Mapping[str, SavedFile] | None = None,
) -> None:
    """Writes one complete checkpoint folder, replacing one of that name. A collective call."""
    partial = partial_of(target)
    if mesh.is_writer:
        shutil.rmtree(partial, ignore_errors=True)
        for name in (*roles, "rng", MODEL_FILES):
            (partial / name).mkdir(parents=True)
        copy_companions(spec.folder, partial / MODEL_FILES, tokenizer_folder)
    dist.barrier()
    for name, role in roles.items():
        save_role(partial / name, role)
    torch.save(random_state(), partial / "rng" / f"rank-{mesh.rank:05d}.pt")
    if mesh.is_writer:
        dtype = str(next(iter(roles.values())).model.config.params_dtype).removeprefix("torch.")
        content = asdict(state) | {"dtype": dtype, "model": signature(read_model_facts(str(spec.folder)))}
        content["lora"] = adapters_of(roles)
        content["frozen"] = {name: role.frozen.to_json() for name, role in roles.items() if role.frozen is not None}
        for name, part in (files or {}).items():
            part.save(partial / name)
        (partial / STATE).write_text(json.dumps(content, indent=1))
    dist.barrier()
    sums = checksums(partial, _files(partial), mesh)
    if mesh.is_writer:
        (partial / MANIFEST).write_text(json.dumps(sums, indent=1))
        put_in_place(partial, target)
    dist.barrier()


def checksums(folder: Path, files: list[str], mesh: Mesh) -> dict[str, list[int]]:
    """[bytes, CRC-32] of each file, each rank reading its share of them. A collective call."""
    mine = {name: _fingerprint(folder / name) for name in files[mesh.rank :: mesh.world_size]}
    return dict(sorted(item for part in gather_objects(mine, mesh.world_group) for item in part.items()))


def point_to(link: Path, target: Path) -> None:
    """Makes `link` a symbolic link to its neighbour `target`, replacing an older one in one piece."""
    fresh = link.with_name(link.name + ".partial")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target.name)
    os.replace(fresh, link)


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _fingerprint(path: Path) -> list[int]:
    """[bytes, CRC-32] of a file: against truncation and silent damage, not against an adversary."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return [path.stat().st_size, crc]


def random_state() -> dict[str, Any]:
    """Of this rank's generators, as it is now."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    """The generators draw on from where `random_state` was taken."""
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
