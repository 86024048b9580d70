"""Whole PPO runs in one process each after the other, with roles offloaded or not: weights, optimizers, metrics."""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import argparse
import hashlib
import json
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megappo.config.load import load_experiment
from megappo.engines.optimizer import Optimizer
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import start_mesh, stop_mesh
from megappo.trainer.build import build_ppo
from megappo.workers.critic import CriticWorker
from megappo.workers.reference import ReferenceWorker


def digest(tensors: Any) -> str:
    """Of all bytes, in order."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def contents(optimizer: Optimizer) -> dict[str, str]:
    """What a rank has trained, as digests."""
    optimizer.memory.need("params", "grads", "optimizer")
    optimizer.memory.need_whole()
    return {
        "params": digest(optimizer.wrapped.module.parameters()),
        "optimizer": digest(optimizer._state_tensors()),
    }


def run_once(file: str, overrides: list[str]) -> dict[str, Any]:
    config = load_experiment(file, overrides)
    mesh = start_mesh(config.layout, seed=0, timeout=timedelta(seconds=120))
    trainer = build_ppo(config, mesh)
    assert isinstance(trainer.critic, CriticWorker) and isinstance(trainer.reference, ReferenceWorker)
    engines = {"actor": trainer.actor.engine, "critic": trainer.critic.engine, "ref": trainer.reference.engine}
    trainer.fit()
    kinds = ("params", "grads", "optimizer")
    after = {role: {kind: engine.memory.device_bytes(kind) for kind in kinds} for role, engine in engines.items()}
    trained = {role: contents(engine.optimizer) for role, engine in engines.items() if role != "ref"}  # type: ignore[attr-defined]
    engines["ref"].memory.need("params")
    whole = {role: {kind: engine.memory.device_bytes(kind) for kind in kinds} for role, engine in engines.items()}
    result = gather_objects({"after": after, "trained": trained, "whole": whole}, mesh.world_group)
    trainer.collector.reward.close()  # type: ignore[union-attr]
    parallel_state.destroy_model_parallel()
    lines = (Path(config.trainer.run_dir) / "metrics.jsonl").read_text().splitlines() if mesh.is_writer else []
    return {"ranks": result, "metrics": [json.loads(line) for line in lines]}


def main(run_once: Callable[[str, list[str]], dict[str, Any]]) -> None:
    """Runs `run_once(file, overrides)` for each of `--runs`, one after the other, and writes what it returns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--runs", nargs="+", required=True, help="NAME=override,override …")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = {}
    for run in arguments.runs:
        name, _, overrides = run.partition("=")
        results[name] = run_once(arguments.config, re.split(r",(?![^\[]*\])", overrides))
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(results))
    stop_mesh()


if __name__ == "__main__":
    main(run_once)
