"""Runs of all kinds that learn from a fixed data set, on any layout, and scores of a reward model on it.

Leaves metrics, and for each run the exported model in `NAME/run/hf/latest`.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import argparse
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megappo.config.load import load_experiment
from megappo.config.reward import RewardConfig
from megappo.experience.sample import Prompt, RolloutSample
from megappo.parallel.mesh import start_mesh, stop_mesh
from megappo.rewards.reward import FailedReward
from megappo.trainer.kinds import build_trainer
from megappo.trainer.reward_models import build_reward_worker

# (question, response, whether it is complete): of uneven lengths, one of them too long for the reward model.
ANSWERS = [
    ("1+1=", "2", True),
    ("say", "a longer answer", False),
    ("x", "", True),
    ("x", "y" * 600, True),
    ("z", "z", True),
]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", required=True, help="NAME=override,override …, or score:NAME=…")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = {}
    for run in arguments.runs:
        name, _, overrides = run.partition("=")
        perform = score if name.startswith("score:") else train
        results[name] = perform(arguments.config, overrides.split(",") if overrides else [], arguments.folder, name)
        # The default group stays: torchrun's store does not take a second one with the same names.
        parallel_state.destroy_model_parallel()
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(results))
    stop_mesh()


def train(config_file: str, overrides: list[str], folder: Path, name: str) -> list[dict[str, Any]]:
    run = folder / name.partition("+")[0] / "run"
    config = load_experiment(config_file, [f"trainer.run_dir={run}", *overrides])
    mesh = start_mesh(config.layout, seed=0, timeout=timedelta(seconds=120))
    trainer = build_trainer(config, mesh)
    trainer.fit()
    trainer.close()
    lines = (run / "metrics.jsonl").read_text().splitlines() if mesh.is_writer else []
    return [json.loads(line) for line in lines]


def score(config_file: str, overrides: list[str], folder: Path, name: str) -> dict[str, Any]:
    """Scores `ANSWERS` with the reward model in `folder / NAME`, data-parallel ranks in turn."""
    config = load_experiment(config_file, overrides)
    mesh = start_mesh(config.layout, seed=0, timeout=timedelta(seconds=120))
    part = {
        "name": "judge",
        "kind": "model",
        "path": str(folder / name.partition(":")[2]),
        "micro_batch_size_per_gpu": 2,
    }
    section = RewardConfig(parts=[part], max_failed_fraction=1.0, failed_score=-9.0)  # type: ignore[list-item]
    worker = build_reward_worker(config, section, mesh)
    mine = range(mesh.dp_rank, len(ANSWERS), mesh.dp)
    samples = [sample(place) for place in mine]
    scored = worker.score(samples)
    worker.close()
    found = dict(zip(mine, scored.batch.scores, strict=True))
    parts: list[dict[int, float]] = [{} for _ in range(mesh.world_size)]
    dist.all_gather_object(parts, found)
    failed: list[list[FailedReward]] = [[] for _ in range(mesh.world_size)]
    dist.all_gather_object(failed, scored.batch.failed)
    return {
        "scores": [value for _, value in sorted({k: v for part in parts for k, v in part.items()}.items())],
        "failed": sorted({failure.error for part in failed for failure in part}),
    }


def sample(place: int) -> RolloutSample:
    question, answer, is_complete = ANSWERS[place]
    prompt = Prompt(place, "made", (9, 9, 9), "not read", messages=({"role": "user", "content": question},))
    return RolloutSample(prompt, place, 0, (5,), (0.0,), answer, "stop" if is_complete else "length")


if __name__ == "__main__":
    main()
