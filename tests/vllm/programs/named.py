"""Runs of which one breaks a tensor in vLLM's engine on the last rank after every switch: is it named?

The product's own wiring, one run for each of `--runs`, a file of name → overrides and the tensor to break (or null).
Rank 0 writes the error of each, or what the engine compared.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import argparse
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import nn

from megappo.config.load import load_experiment
from megappo.engines.vllm_rollout import VLLMRolloutEngine
from megappo.errors import WeightSwitchError
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh
from megappo.trainer.build import build_ppo
from megappo.trainer.weight_switch import WeightSwitch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = {}
    for name, run in json.loads(arguments.runs.read_text()).items():
        overrides = [*run["overrides"], f"trainer.run_dir={arguments.folder / name}"]
        config = load_experiment(arguments.config, overrides)
        mesh = start_mesh(config.layout, seed=0, timeout=timedelta(seconds=120))
        trainer = build_ppo(config, mesh)
        collector = trainer.collector
        engine = collector.rollout.engine
        assert isinstance(engine, VLLMRolloutEngine)
        switch = WeightSwitch(collector.rollout, trainer.actor, collector.feed.prompts, mesh, check_every=1, limit=1e-3)
        switch.to_rollout(1)
        untouched = engine.worst_tensor()
        switch.to_training()
        results[name] = {"untouched": str(untouched), "error": error_of(switch, engine, mesh, run["break"])}
        trainer.close()
        parallel_state.destroy_model_parallel()
    if mesh.is_writer:
        arguments.out.write_text(json.dumps(results))
    stop_mesh()


def error_of(switch: WeightSwitch, engine: VLLMRolloutEngine, mesh: Mesh, tensor: str) -> str:
    transfer = engine._transfer.transfer

    def breaking(vllm_model: nn.Module, worker: Any) -> Any:
        moved = transfer(vllm_model, worker)
        if mesh.rank == mesh.world_size - 1:
            module: Any = vllm_model.get_submodule(tensor)
            broken(module)
        return moved

    engine._transfer.transfer = breaking  # type: ignore[method-assign]
    try:
        switch.to_rollout(2)
    except WeightSwitchError as error:
        return str(error)
    return "none"


@torch.no_grad()
def broken(module: Any) -> None:
    """The rows of a matrix in another order, in whatever vLLM computes with."""
    if hasattr(module, "w13_weight"):
        module.w13_weight.data = module.w13_weight.data.flip(0)
        return
    if module.weight.numel():  # not packed: where it lies
        module.weight.data.copy_(module.weight.data.flip(0))
        return
    width = module.input_size_per_partition
    matrix = module.cpu_linear(torch.eye(width), module.weight, None).T
    module.weight = nn.Parameter(matrix.flip(0).contiguous(), requires_grad=False)
    module.quant_method.process_weights_after_loading(module)


if __name__ == "__main__":
    main()
