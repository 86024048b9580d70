"""Checkpoints: Megatron's sharded tensors of every trained role, and the loop's own state.

A folder `step-000010` is complete or absent: it is written beside its name, checksummed, and renamed last. Any layout
can load what another one saved. Not here: Hugging Face folders (models/import_hf.py, models/export_hf.py).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values

from megappo.config.checkpoint_folder import (
    BEST,
    LATEST,
    MANIFEST,
    MODEL_FILES,
    STATE,
    check_same_model,
    complete_checkpoints,
    damaged,
    read_part,
    read_state,
    signature,
)
from megappo.config.lora import LoraConfig
from megappo.config.model_folder import read_model_facts
from megappo.engines.optimizer import Optimizer
from megappo.errors import DataError
from megappo.models.attach_lora import attached_lora
from megappo.models.build import ModelSpec
from megappo.models.chunks import StageModel
from megappo.models.experts import EXTRA_STATE
from megappo.models.hf_folder import copy_companions
from megappo.models.sharded import shards_of
from megappo.parallel import write_queue
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import Mesh


@dataclass(frozen=True)
class SavedRole:
    """A role's part of a checkpoint: the model's bare stage, and its optimizer where it is trained."""

    model: StageModel
    optimizer: Optimizer | None


@dataclass(frozen=True)
class LoopState:
    """What the loop itself needs to go on: JSON values only."""

    step: int
    data: dict[str, Any]
    kl_controller: dict[str, Any] | None
    seed: int
    best: dict[str, Any] | None = None


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
        missing = [name for name in roles if not (path / name).is_dir()]
        if missing:
            raise DataError(
                f"{path}: this checkpoint holds no {missing[0]}; resume with the configuration that wrote it"
            )
        for name, role in roles.items():
            load_role(path / name, role)
        rng = path / "rng" / f"rank-{self._mesh.rank:05d}.pt"
        if rng.exists():  # absent where the layout has more ranks now; sampling noise does not depend on it
            _restore_rng(torch.load(rng, weights_only=False))
        for name, part in (files or {}).items():
            if (path / name).exists():  # absent where the run that saved had no such part
                part.load(path / name)
        return LoopState(**saved)

    def _remove_old(self) -> None:
        if self._keep is not None:
            best = (self._folder / BEST).resolve()
            for old in complete_checkpoints(self._folder)[: -self._keep]:
                if old.resolve() != best:
                    shutil.rmtree(old)


def adapters_of(roles: Mapping[str, SavedRole]) -> dict[str, Any]:
    """The settings of the adapters of each role that has some, as JSON."""
    found = {name: attached_lora(role.model) for name, role in roles.items()}
    return {name: lora.model_dump(mode="json") for name, lora in found.items() if lora is not None}


def check_same_adapters(path: Path, saved: Mapping[str, Any], roles: Mapping[str, SavedRole]) -> None:
    """DataError where a role has other adapters in the checkpoint `path` than in this run, or only in one of them."""
    for name, role in roles.items():
        ours = attached_lora(role.model)
        now = ours.shape if ours is not None else None
        then = LoraConfig.model_validate(saved[name]).shape if name in saved else None
        if now != then:
            place = "critic.lora" if name == "critic" else "model.lora"
            raise DataError(
                f"{path}: its {name} was trained with {place} {then or 'rank 0'}, this run has {now or 'rank 0'}; "
                "resume with the settings of the checkpoint, or start a new run"
            )


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
    partial = target.with_name(target.name + ".partial")
    if mesh.is_writer:
        shutil.rmtree(partial, ignore_errors=True)
        for name in (*roles, "rng", MODEL_FILES):
            (partial / name).mkdir(parents=True)
        for folder in (spec.folder, tokenizer_folder):
            copy_companions(folder, partial / MODEL_FILES)
        shutil.copyfile(spec.folder / "config.json", partial / MODEL_FILES / "config.json")
    dist.barrier()
    write_queue.install()
    for name, role in roles.items():
        dist_checkpointing.save(_role_state(role, loading=False), str(partial / name))
    torch.save(_rng_state(), partial / "rng" / f"rank-{mesh.rank:05d}.pt")
    if mesh.is_writer:
        dtype = str(next(iter(roles.values())).model.config.params_dtype).removeprefix("torch.")
        content = asdict(state) | {"dtype": dtype, "model": signature(read_model_facts(str(spec.folder)))}
        content["lora"] = adapters_of(roles)
        for name, part in (files or {}).items():
            part.save(partial / name)
        (partial / STATE).write_text(json.dumps(content, indent=1))
    dist.barrier()
    sums = checksums(partial, _files(partial), mesh)
    if mesh.is_writer:
        (partial / MANIFEST).write_text(json.dumps(sums, indent=1))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
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


def load_role(folder: Path, role: SavedRole) -> None:
    """Loads one role's weights, and its optimizer's state where it has an optimizer."""
    state = _role_state(role, loading=True)
    # Which layers have an extra state depends on their kind: none is read.
    state["model"] = {name: entry for name, entry in state["model"].items() if not name.endswith(EXTRA_STATE)}
    check_same_optimizer(folder, state)
    with warnings.catch_warnings():  # of megatron (0.16.1) to itself, on every rank
        warnings.filterwarnings("ignore", "`load_state_dict` is deprecated", FutureWarning)
        loaded = dist_checkpointing.load(state, str(folder))
    shards = shards_of(role.model)
    if shards is not None:
        shards.load(loaded["model"])
    else:
        _load_weights(role.model, loaded["model"])
    if role.optimizer is not None:
        role.optimizer.load_state(loaded)


def _load_weights(model: torch.nn.Module, weights: dict[str, Any]) -> None:
    """All parameters and buffers; RuntimeError where there are too few or too many."""
    result = model.load_state_dict(weights, strict=False)
    missing = [name for name in result.missing_keys if not name.endswith(EXTRA_STATE)]
    if missing or result.unexpected_keys:
        raise RuntimeError(f"weights that a checkpoint has not: {missing}; that the model has not: {result[1]}")


def check_same_optimizer(folder: Path, state: Mapping[str, Any]) -> None:
    """DataError where the checkpoint holds another kind of optimizer than the one whose sharded `state` this is."""
    own = [each.key for each in nested_values(state.get("optimizer", {})) if isinstance(each, ShardedTensor)]
    missing = sorted(set(own) - set(dist_checkpointing.load_tensors_metadata(str(folder))))
    if missing:
        raise DataError(
            f"{folder}: its optimizer is of another kind, and has no {missing[0]}; resume with optim."
            "use_distributed_optimizer and fsdp.enable of the run that saved it (float32 goes on from fsdp.enable true "
            "with use_distributed_optimizer false, and the other way)"
        )


def _role_state(role: SavedRole, *, loading: bool) -> dict[str, Any]:
    metadata = {
        # Every optimizer tensor in the model's own shape, so that another layout can load it.
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        "singleton_local_shards": False,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    shards = shards_of(role.model)
    of_model = role.model.sharded_state_dict if shards is None else shards.sharded_state
    state: dict[str, Any] = {"model": of_model(metadata=metadata)}
    if role.optimizer is not None:
        model_state = {"model": of_model(metadata=metadata)}
        state |= role.optimizer.sharded_state(model_state, loading=loading, metadata=metadata)
    return state


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _fingerprint(path: Path) -> list[int]:
    """[bytes, CRC-32] of a file: against truncation and silent damage, not against an adversary."""
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return [path.stat().st_size, crc]


def _rng_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_rng(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    numpy.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
