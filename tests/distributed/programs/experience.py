"""Turns with an environment, and whole runs, with the product's own wiring; what is right is not here.

`--runs FILE` holds {name: {"kind": "turns" | "run", "overrides": […]}}; rank 0 writes what all ranks saw.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import argparse
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megappo.config.load import load_experiment
from megappo.experience.batch import ExperienceBatch
from megappo.observe.memory import PeakMemory
from megappo.parallel.mesh import start_mesh, stop_mesh
from megappo.trainer.build import build_ppo
from megappo.trainer.loop import Step
from megappo.trainer.ppo import PPOTrainer
from megappo.workers.reference import ReferenceWorker


class Silent:
    """Stands for the reporter."""

    def phase(self, step: int, name: str) -> None: ...

    def progress(self, done: int, total: int) -> None: ...


def turns(trainer: PPOTrainer, world_size: int) -> dict[str, Any]:
    """One rollout of several turns, its log-probs in the trainer, and an update whose advantages are NaN wherever a
    token is not the policy's."""
    step = Step(1, Silent(), world_size, PeakMemory())  # type: ignore[arg-type]
    collected = trainer.collector.collect(step)
    batch = trainer.actor.fill_old_log_probs(ExperienceBatch.from_samples(collected.samples))
    old = batch.get("old_log_probs")
    has_reference = isinstance(trainer.reference, ReferenceWorker)
    reference = trainer.reference.fill_log_probs(batch).get("ref_log_probs") if has_reference else None
    rows = []
    for index, sample in enumerate(collected.samples):
        begin = int(batch.cu_seqlens[index]) + len(sample.prompt.token_ids)
        end = begin + len(sample.response_ids)
        mask = batch.response_mask[begin:end]
        rows.append(
            {
                "position": sample.position,
                "index": sample.prompt.index,
                "prompt_ids": sample.prompt.token_ids,
                "response_ids": sample.response_ids,
                "mask": mask.tolist(),
                "rollout": sample.rollout_log_probs,
                "old": old[begin:end].tolist(),
                "reference": None if reference is None else reference[begin:end].tolist(),
                "text": sample.text,
                "finish_reason": sample.finish_reason,
                "num_turns": sample.num_turns,
            }
        )
    advantages = torch.where(batch.response_mask, 1.0, torch.nan)
    if reference is not None:
        batch = batch.fill(ref_log_probs=reference)
    update = trainer.actor.update(batch.fill(advantages=advantages))
    told = trainer.loop._peak._absent is trainer.collector.rollout.absent  # type: ignore[union-attr]
    return {"rows": rows, "update": update, "metrics": step.metrics, "peaks are told of the engine": told}


def run(name: str, entry: dict[str, Any], config_file: str, folder: Path) -> dict[str, Any]:
    config = load_experiment(config_file, [*entry["overrides"], f"trainer.run_dir={folder / name}"])
    mesh = start_mesh(config.layout, seed=0, timeout=timedelta(seconds=120))
    trainer = build_ppo(config, mesh)
    if entry["kind"] == "turns":
        result = turns(trainer, mesh.world_size)
    else:
        trainer.fit()
        result = {}
    trainer.close()
    parallel_state.destroy_model_parallel()
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = {}
    for name, entry in json.loads(arguments.runs.read_text()).items():
        own = run(name, entry, arguments.config, arguments.folder)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        results[name] = everyone
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(results))
    stop_mesh()


if __name__ == "__main__":
    main()
