"""Trains adapters with vLLM as the engine, then asks both for log-probs of the same responses; rank 0 writes them.

Arguments: --config FILE --overrides SETTING… --out FILE.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import argparse
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megappo.config.load import load_experiment
from megappo.engines.rollout import SamplingParams
from megappo.models.lora import adapters_off
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh
from megappo.trainer.build import build_ppo
from megappo.trainer.collect import Collector
from megappo.trainer.ppo import PPOTrainer
from tests.distributed.programs.lora import adapted_bytes, fingerprint
from tests.vllm.programs.switch import Setup

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--overrides", nargs="*", default=[])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    config = load_experiment(arguments.config, arguments.overrides)
    mesh = start_mesh(config.layout, seed=0, timeout=timedelta(minutes=2))
    trainer = build_ppo(config, mesh)
    result = run(trainer, mesh)
    trainer.close()
    if mesh.is_writer:
        arguments.out.write_text(json.dumps(result))
    stop_mesh()


def run(trainer: PPOTrainer, mesh: Mesh) -> dict[str, Any]:
    model, spec = trainer.actor.engine.optimizer.wrapped.module, trainer.loop._parts.spec
    collector = trainer.collector
    assert isinstance(collector, Collector)
    frozen = fingerprint(model)
    trainer.fit()
    engine = collector.rollout.engine
    report = engine.sync_weights()
    on = Setup(mesh, spec, model, engine, untouched=True)  # type: ignore[arg-type]
    completions = on.generate(GREEDY)
    difference = on.difference(completions)
    with adapters_off(model):
        without = on.difference(completions)
    after = fingerprint(model)
    engine.release()
    return {
        "difference": max(gather_objects(difference, dist.group.WORLD)),
        "difference_without_adapters": without,
        "base_is_unchanged": all(gather_objects(after == frozen, dist.group.WORLD)),
        "copied": report.bytes_copied,
        "received": report.bytes_received,
        "aliased": report.bytes_aliased,
        "adapted_bytes": adapted_bytes(model),
    }


if __name__ == "__main__":
    main()
