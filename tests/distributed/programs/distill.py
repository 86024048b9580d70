"""Implicit rewards, and pairs beside fresh responses, on any layout. Leaves what the test compares, from rank 0."""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import argparse
import json
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch.distributed as dist

from megappo.config.load import load_experiment
from megappo.config.reward import RewardConfig
from megappo.experience.batch import ExperienceBatch
from megappo.experience.sample import Prompt, RolloutSample
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh
from megappo.trainer.kinds import build_trainer
from megappo.trainer.pair_replay import PairReplay
from megappo.trainer.ppo import PPOTrainer
from megappo.trainer.reward_models import build_reward_worker

# (prompt, response, mask): of uneven lengths, one empty, one with an environment's tokens in it.
SAMPLES: list[tuple[tuple[int, ...], tuple[int, ...], tuple[bool, ...] | None]] = [
    ((5, 6, 7), (8, 9, 10, 2), None),
    ((11,), (), None),
    ((12, 13), (14, 15, 16, 17, 2), (True, False, False, True, True)),
    ((20, 21, 22, 23), (24,), None),
    ((30, 31), (32, 33, 2), None),
    ((40, 41), (42, 43, 44, 45), None),
    ((50, 51), (52, 2), None),
    ((60,), (61, 62, 2), None),
]


class Recorder:
    """A step of which only the number and the metrics matter."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.metrics: dict[str, float] = {}

    def record(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--overrides", nargs="*", default=[])
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    config = load_experiment(arguments.config, arguments.overrides)
    mesh = start_mesh(config.layout, seed=0, timeout=timedelta(seconds=120))
    samples = [sample(place) for place in range(len(SAMPLES))][mesh.dp_rank :: mesh.dp]
    results: dict[str, Any] = {"samples": [one.position for one in samples]}
    for name, at_end in (("dense", False), ("at_end", True)):
        part = {
            "name": name, "kind": "implicit", "policy": arguments.policy, "beta": 0.25, "weight": 2.0,
            "at_end": at_end, "micro_batch_size_per_gpu": 3,
        }  # fmt: skip
        worker = build_reward_worker(config, RewardConfig(parts=[part]), mesh)  # type: ignore[list-item]
        scored = worker.score(samples).batch
        worker.close()
        results[name] = {"scores": scored.scores, "token_scores": scored.token_scores, "parts": scored.parts[name]}
    trainer = build_trainer(config, mesh)
    assert isinstance(trainer, PPOTrainer) and isinstance(trainer.replay, PairReplay)
    results["pairs"] = [
        {"prompt": one.prompt.token_ids, "response": one.response_ids, "log_probs": one.rollout_log_probs}
        for one in trainer.replay.samples
    ]
    results["steps"] = [mixed(trainer, mesh, samples, number) for number in (1, 2)]
    trainer.close()
    everything: list[Any] = [None] * mesh.world_size
    dist.all_gather_object(everything, results)
    if dist.get_rank() == 0:
        with open(arguments.out, "w", encoding="utf-8") as file:
            json.dump(everything, file)
    stop_mesh()


def mixed(trainer: PPOTrainer, mesh: Mesh, samples: list[RolloutSample], number: int) -> dict[str, Any]:
    """One step on given responses up to the mixture, and an update, after which the policy is another."""
    step = Recorder(number)
    batch = trainer.shaping.batch(samples, trainer.collector.reward.score(samples))  # type: ignore[union-attr]
    batch = trainer.reference.fill_log_probs(trainer.actor.fill_old_log_probs(batch))
    fresh = trainer.advantages.fill(trainer.critic.fill_values(batch))
    batch = trainer.replay.mix(fresh, step)  # type: ignore[arg-type]
    now = trainer.actor.log_probs_now(batch)
    told = {
        "metrics": step.metrics,
        "fresh_old": per_sequence(fresh, fresh.get("old_log_probs")),
        "token_ids": per_sequence(batch, batch.token_ids),
        "old": per_sequence(batch, batch.get("old_log_probs")),
        "reference": per_sequence(batch, batch.get("ref_log_probs")),
        "token_scores": per_sequence(batch, batch.get("token_scores")),
        "now": per_sequence(batch, now),
        "advantages": per_sequence(batch, batch.get("advantages")),
        "drawn": sorted(trainer.replay.draw(number).items()),  # type: ignore[union-attr]
    }
    trainer.actor.update(batch)
    return told


def per_sequence(batch: ExperienceBatch, flat: Any) -> list[list[float]]:
    starts = batch.cu_seqlens.tolist()
    return [flat[start:stop].tolist() for start, stop in pairwise(starts)]


def sample(place: int) -> RolloutSample:
    prompt, response, mask = SAMPLES[place]
    log_probs = tuple(-1.0 if own else 0.0 for own in mask or (True,) * len(response))
    made = Prompt(place, "made", prompt, "not read")
    return RolloutSample(made, place, place % 2, response, log_probs, "not read", "stop", mask)


if __name__ == "__main__":
    main()
