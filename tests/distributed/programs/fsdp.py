"""Whole PPO runs in one process each after the other, with roles cut over data-parallel ranks or not: what they learn,
what each rank holds, and what is exported before the first step."""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from megappo.config.load import load_experiment
from megappo.engines.training import ModelEngine
from megappo.models.build import read_model
from megappo.models.chunks import unwrapped
from megappo.models.export_hf import export_hf
from megappo.models.sharded import shards_of
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import start_mesh
from megappo.trainer.build import build_ppo
from megappo.workers.critic import CriticWorker
from megappo.workers.reference import ReferenceWorker
from tests.distributed.programs.offload import digest, main

KINDS = ("params", "grads", "optimizer")


def held(engine: ModelEngine) -> dict[str, int]:
    """Bytes of this rank between two phases: by kind, of gathered parameters, and how many parameters there are."""
    model = unwrapped(engine.model)
    shards = shards_of(model)
    shapes = [parameter.shape for parameter in (model.parameters() if shards is None else shards.parts.values())]
    numel = sum(shape.numel() for shape in shapes)
    found = {kind: engine.memory.device_bytes(kind) for kind in KINDS} | {"numel": numel, "gathered": 0}
    for unit in shards._units if shards is not None else []:
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            outputs = [output for one in group.fsdp_params for output in one.all_gather_outputs]
            found["gathered"] += sum(output.untyped_storage().nbytes() for output in outputs)
    return found


def runs_alone(engine: ModelEngine) -> bool:
    """Whether a rank can run the model while it is held whole, and the others do nothing."""
    engine.memory.hold("params")
    tokens = torch.arange(4, 12)[None]
    alone = True
    if engine.mesh.dp_rank == 0:
        with torch.no_grad():
            alone = bool(engine.model(tokens, tokens - 4, None).isfinite().all())
    engine.memory.let_go("params")
    return alone


def run_once(file: str, overrides: list[str]) -> dict[str, Any]:
    config = load_experiment(file, overrides)
    mesh = start_mesh(config.layout, seed=0, timeout=timedelta(seconds=120))
    trainer = build_ppo(config, mesh)
    assert isinstance(trainer.critic, CriticWorker) and isinstance(trainer.reference, ReferenceWorker)
    engines = {"actor": trainer.actor.engine, "critic": trainer.critic.engine, "ref": trainer.reference.engine}
    folder = Path(config.trainer.run_dir)
    if config.trainer.resume == "never":
        target = folder.with_name(f"{folder.name}-untrained")
        export_hf(unwrapped(engines["actor"].model), read_model(Path(config.model.path)), mesh, target)
    trainer.fit()
    trained = {
        role: digest([*engine.optimizer.wrapped.parameters(), *engine.optimizer._state_tensors()])  # type: ignore[attr-defined]
        for role, engine in engines.items()
        if role != "ref" and (shards_of(unwrapped(engine.model)) is not None or mesh.dp == 1)
    }
    bytes_held = {role: held(engine) for role, engine in engines.items()}
    mine = {"trained": trained, "held": bytes_held, "alone": runs_alone(engines["actor"])}
    result = gather_objects(mine, mesh.world_group)
    trainer.collector.reward.close()  # type: ignore[union-attr]
    parallel_state.destroy_model_parallel()
    lines = (folder / "metrics.jsonl").read_text().splitlines() if mesh.is_writer else []
    return {"ranks": result, "metrics": [json.loads(line) for line in lines]}


if __name__ == "__main__":
    main(run_once)
