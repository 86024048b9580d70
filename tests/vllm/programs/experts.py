"""Rollouts of vLLM on models whose experts nearly tie, and the trainer's log-probs of them, with the product's wiring.

`--runs FILE` holds {name: {"overrides": […], "blocks": N or null}}; rank 0 writes what all ranks saw of each. Blocks
have 32 tokens, and `blocks` is how many of them the cache has.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core import parallel_state

from megappo.config.load import load_experiment
from megappo.engines.vllm.environment import prepare_environment
from megappo.engines.vllm_rollout import VLLMRolloutEngine
from megappo.experience.batch import ExperienceBatch
from megappo.observe.memory import PeakMemory
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import start_mesh, stop_mesh
from megappo.trainer.build import build_ppo
from megappo.trainer.loop import Step
from megappo.trainer.ppo import PPOTrainer
from tests.distributed.programs.experience import Silent

BLOCK = 32


@dataclass
class Seen:
    """What vLLM's scheduler did: how many tokens requests found in the prefix cache, which tokens each preempted
    request had computed, and the most tokens of one request in each step."""

    cached: int = 0
    preempted: list[list[int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def watch(self, engine: VLLMRolloutEngine) -> None:
        scheduler = engine._llm.llm_engine.engine_core.engine_core.scheduler
        preempt, schedule = scheduler._preempt_request, scheduler.schedule

        def preempting(request: Any, *rest: Any, **settings: Any) -> None:
            self.preempted.append(list(request.all_token_ids)[: request.num_computed_tokens])
            preempt(request, *rest, **settings)

        def scheduling(*arguments: Any, **settings: Any) -> Any:
            output = schedule(*arguments, **settings)
            self.cached += sum(request.num_computed_tokens for request in output.scheduled_new_reqs)
            self.steps.append(max(output.num_scheduled_tokens.values(), default=0))
            return output

        scheduler._preempt_request, scheduler.schedule = preempting, scheduling


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    prepare_environment()
    import vllm

    llm, results = vllm.LLM, {}
    for name, entry in json.loads(arguments.runs.read_text()).items():
        vllm.LLM = partial(llm, block_size=BLOCK, num_gpu_blocks_override=entry["blocks"])
        config = load_experiment(arguments.config, [*entry["overrides"], f"trainer.run_dir={arguments.folder / name}"])
        mesh = start_mesh(config.layout, seed=0, timeout=timedelta(seconds=120))
        trainer = build_ppo(config, mesh)
        results[name] = gather_objects(rollout(trainer, mesh.world_size), mesh.world_group)
        trainer.close()
        parallel_state.destroy_model_parallel()
    if mesh.is_writer:
        arguments.out.write_text(json.dumps(results))
    stop_mesh()


def rollout(trainer: PPOTrainer, world_size: int) -> dict[str, Any]:
    """Two steps' samples, with an update between them, and the old log-probs of the second."""
    engine, seen = trainer.collector.rollout.engine, Seen()  # type: ignore[union-attr]
    assert isinstance(engine, VLLMRolloutEngine)
    fill: Callable[[ExperienceBatch], ExperienceBatch] = trainer.actor.fill_old_log_probs
    first = collected(trainer, 1, world_size)
    batch = fill(ExperienceBatch.from_samples(first))
    update = trainer.actor.update(batch.fill(advantages=batch.response_mask.float()))
    seen.watch(engine)
    samples = collected(trainer, 2, world_size)
    batch = fill(ExperienceBatch.from_samples(samples))
    old, rows = batch.get("old_log_probs"), []
    for index, sample in enumerate(samples):
        end = int(batch.cu_seqlens[index + 1])
        experts = sample.routed_experts
        rows.append(
            {
                "position": sample.position,
                "prompt_ids": sample.prompt.token_ids,
                "response_ids": sample.response_ids,
                "mask": batch.response_mask[end - len(sample.response_ids) : end].tolist(),
                "rollout": sample.rollout_log_probs,
                "old": old[end - len(sample.response_ids) : end].tolist(),
                "num_turns": sample.num_turns,
                "experts": None if experts is None else experts.tolist(),
            }
        )
    return {
        "rows": rows,
        "update": update,
        "rollout": trainer.actor.rollout_metrics(),
        "graphs": engine._llm.llm_engine.vllm_config.compilation_config.cudagraph_mode.name != "NONE",
        "cached": seen.cached,
        "preempted": seen.preempted,
        "largest step": max(seen.steps),
    }


def collected(trainer: PPOTrainer, number: int, world_size: int) -> Any:
    step = Step(number, Silent(), world_size, PeakMemory())  # type: ignore[arg-type]
    return trainer.collector.collect(step).samples


if __name__ == "__main__":
    main()
