"""A role's part of a checkpoint: Megatron's sharded tensors of its weights and optimizer, and which adapters it has.

Any layout can load what another one saved. The folder around it, and what else is in it, is in `checkpoint.py`.
"""

from __future__ import annotations

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values

from megappo.config.lora import LoraConfig
from megappo.engines.optimizer import Optimizer
from megappo.errors import DataError
from megappo.models.attach_lora import attached_lora
from megappo.models.chunks import StageModel
from megappo.models.experts import EXTRA_STATE
from megappo.models.part_state import PartState
from megappo.models.sharded import shards_of
from megappo.parallel import write_queue
from megappo.trainer.frozen_weights import FrozenWeights


@dataclass(frozen=True)
class SavedRole:
    """A role's part of a checkpoint: the model's bare stage, and its optimizer where it is trained.

    Of a model with adapters whose `frozen` weights are on disk, a checkpoint holds what is trained alone.
    """

    model: StageModel
    optimizer: Optimizer | None
    frozen: FrozenWeights | None = None


def save_role(folder: Path, role: SavedRole) -> None:
    """Writes one role's weights, without the frozen ones that are on disk, and its optimizer's state where it has an
    optimizer. A collective call."""
    write_queue.install()
    state = _role_state(role, loading=False)
    if role.frozen is not None:
        state["model"] = _trained(role.model, state["model"])
    dist_checkpointing.save(state, str(folder))


def load_role(folder: Path, role: SavedRole, *, without_frozen: bool = False) -> None:
    """Loads one role's weights, and its optimizer's state where it has an optimizer. A collective call.
    `without_frozen`: the checkpoint does not hold the frozen weights, and they stay as they are.

    Raises DataError where the optimizer is of another kind.
    """
    state = _role_state(role, loading=True)
    # Which layers have an extra state depends on their kind: none is read.
    state["model"] = {name: entry for name, entry in state["model"].items() if not name.endswith(EXTRA_STATE)}
    if without_frozen:
        state["model"] = _trained(role.model, state["model"])
    check_same_optimizer(folder, state)
    with warnings.catch_warnings():  # of megatron (0.16.1) to itself, on every rank
        warnings.filterwarnings("ignore", "`load_state_dict` is deprecated", FutureWarning)
        loaded = dist_checkpointing.load(state, str(folder))
    shards = shards_of(role.model)
    if shards is not None:
        shards.load(loaded["model"])
    else:
        _load_weights(role.model, loaded["model"], without_frozen=without_frozen)
    if role.optimizer is not None:
        role.optimizer.load_state(loaded)


def _trained(model: torch.nn.Module, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `entries`, by name, that a run of this model with adapters changes."""
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {name: entry for name, entry in entries.items() if name in names}


def _load_weights(model: torch.nn.Module, weights: dict[str, Any], *, without_frozen: bool) -> None:
    """All parameters and buffers, or those that are trained; RuntimeError where there are too few or too many."""
    result = model.load_state_dict(weights, strict=False)
    missing = [name for name in result.missing_keys if not name.endswith(EXTRA_STATE)]
    if without_frozen:
        missing = list(_trained(model, dict.fromkeys(missing)))
    if missing or result.unexpected_keys:
        raise RuntimeError(f"weights that a checkpoint has not: {missing}; that the model has not: {result[1]}")


def check_same_optimizer(folder: Path, state: Mapping[str, Any]) -> None:
    """DataError where the checkpoint holds another kind of optimizer than the one whose sharded `state` this is."""
    entries = nested_values(state.get("optimizer", {}))
    own = [each.key for each in entries if isinstance(each, ShardedTensor | PartState)]
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
