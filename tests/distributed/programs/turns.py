"""Turns between training and generation, and the check of a switch, with the product's own wiring on one layout a run.

Rank 0 writes what all ranks saw; what is right is not here.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import argparse
import contextlib
import json
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megappo.config.load import load_experiment
from megappo.engines.native_layout import NativeLayoutEngine
from megappo.engines.rollout import (
    Completion,
    GenerationRequest,
    Progress,
    RolloutEngine,
    SamplingParams,
    SyncReport,
    WorstTensor,
)
from megappo.errors import WeightSwitchError
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh
from megappo.trainer.build import build_ppo
from megappo.trainer.ppo import PPOTrainer
from megappo.trainer.weight_switch import WeightSwitch

TENSOR = "decoder.layers.1.self_attention.linear_proj.weight"


class Watched:
    """An engine that writes down what it is asked for."""

    def __init__(self, engine: RolloutEngine, diary: list[str]) -> None:
        self.engine = engine
        self.replicas = engine.replicas
        self.diary = diary

    def sync_weights(self) -> SyncReport:
        self.diary.append("sync")
        return self.engine.sync_weights()

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[Completion]:
        self.diary.append(f"generate {sampling.max_tokens}")
        return self.engine.generate(requests, sampling, progress)

    def release(self) -> None:
        self.diary.append("release")
        self.engine.release()

    def close(self) -> None:
        self.diary.append("close")
        self.engine.close()


class Wrong(Watched):
    """An engine that holds another tensor than the trainer, on `rank` alone, after its first `times` syncs."""

    factor = -3.0

    def __init__(self, engine: RolloutEngine, diary: list[str], model: torch.nn.Module, times: int, rank: int) -> None:
        super().__init__(engine, diary)
        self.parameter = dict(model.named_parameters())[TENSOR]
        self.times = times
        self.is_here = dist.get_rank() == rank

    def sync_weights(self) -> SyncReport:
        self.times -= 1
        return super().sync_weights()

    @property
    def is_wrong(self) -> bool:
        return self.is_here and self.times >= 0

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[Completion]:
        with self.replaced() if self.is_wrong else contextlib.nullcontext():
            return super().generate(requests, sampling, progress)

    @contextlib.contextmanager
    def replaced(self) -> Iterator[None]:
        kept = self.parameter.detach().clone()
        self.parameter.data.mul_(self.factor)
        try:
            yield
        finally:
            self.parameter.data.copy_(kept)


class Named(Wrong):
    """One that can tell which."""

    def worst_tensor(self) -> WorstTensor | None:
        return WorstTensor(0.25, TENSOR) if self.is_wrong else None


class NoNumbers(Named):
    """One whose logits are no numbers then."""

    factor = float("nan")


class Broken(Watched):
    """An engine in a layout of its own whose received part of a tensor is broken after each of its first `times` syncs,
    on the last rank: overwritten, or exchanged for other memory. What is said of it is the engine's own."""

    def __init__(self, engine: NativeLayoutEngine, diary: list[str], times: int, *, is_moved: bool) -> None:
        super().__init__(engine, diary)
        self.native = engine
        self.times = times
        self.is_moved = is_moved
        self.difference = 0.0

    def sync_weights(self) -> SyncReport:
        report = super().sync_weights()
        self.times -= 1
        if self.times >= 0 and dist.get_rank() == dist.get_world_size() - 1:
            pieces = self.native._weights.parameters
            received, own = pieces[TENSOR]
            with torch.no_grad():
                wrong = received * -3
                self.difference = float((wrong - received).abs().max())
                if self.is_moved:
                    pieces[TENSOR] = (wrong, own)
                else:
                    received.copy_(wrong)
        return report

    def worst_tensor(self) -> WorstTensor | None:
        return self.native.worst_tensor()


def whole_run(trainer: PPOTrainer) -> list[str]:
    """The diary of a run of two steps with evaluations, and of its end."""
    diary: list[str] = []
    trainer.collector.rollout.engine = Watched(trainer.collector.rollout.engine, diary)  # type: ignore[assignment]
    score, close = trainer.collector.reward.score, trainer.collector.reward.close
    update = trainer.actor.update

    def noted(note: str, call: Any) -> Any:
        def noting(*arguments: Any) -> Any:
            diary.append(note)
            return call(*arguments)

        return noting

    trainer.collector.reward.score = noted("score", score)  # type: ignore[method-assign]
    trainer.collector.reward.close = noted("close rewards", close)  # type: ignore[method-assign]
    trainer.actor.update = noted("update", update)  # type: ignore[method-assign]
    trainer.fit()
    trainer.close()
    return diary


def wrong_switches(
    trainer: PPOTrainer, mesh: Mesh, times: int, check_every: int, steps: int, kind: type[Wrong] = Named
) -> dict[str, Any]:
    """Switches with an engine that is wrong `times` times on the last rank."""
    engine, model = trainer.collector.rollout.engine, trainer.actor.engine.model.module
    return switches(trainer, mesh, kind(engine, [], model, times, mesh.world_size - 1), check_every, steps)


def broken_switches(trainer: PPOTrainer, mesh: Mesh, times: int, *, is_moved: bool) -> dict[str, Any]:
    engine: Any = trainer.collector.rollout.engine
    broken = Broken(engine, [], times, is_moved=is_moved)
    return switches(trainer, mesh, broken, check_every=2, steps=2) | {"difference": broken.difference}


def switches(trainer: PPOTrainer, mesh: Mesh, watched: Watched, check_every: int, steps: int) -> dict[str, Any]:
    """Metrics and diary of switches at steps 1, 2, … with `watched` in the place of its engine."""
    diary, engine, collector = watched.diary, trainer.collector.rollout.engine, trainer.collector
    collector.rollout.engine = watched  # type: ignore[assignment]
    switch = WeightSwitch(
        collector.rollout, trainer.actor, collector.feed.prompts, mesh, check_every=check_every, limit=1e-3
    )
    metrics: list[dict[str, float]] = []
    error = None
    try:
        for step in range(1, steps + 1):
            metrics.append(switch.to_rollout(step))
            switch.to_training()
    except WeightSwitchError as mistake:
        error = str(mistake)
    trainer.collector.rollout.engine = engine
    return {"metrics": metrics, "diary": diary, "error": error}


def samples(trainer: PPOTrainer, mesh: Mesh) -> list[list[Any]]:
    """(position, token ids, log-probs, text) of this rank's part of a step."""
    positions = trainer.plan.positions_of(mesh.dp_rank)
    prompts = [trainer.collector.feed.prompts[row] for row in (3, 1, 7, 5)]
    trainer.collector.rollout.sync_weights()
    drawn = trainer.collector.rollout.generate(prompts, positions, 4)
    trainer.collector.rollout.release()
    return [
        [sample.position, list(sample.response_ids), list(sample.rollout_log_probs), sample.text] for sample in drawn
    ]


def run_layout(config_file: str, overrides: list[str], run_dir: Path) -> dict[str, Any]:
    config = load_experiment(config_file, [*overrides, f"trainer.run_dir={run_dir}"])
    mesh = start_mesh(config.layout, seed=0, timeout=timedelta(seconds=120))
    trainer = build_ppo(config, mesh)
    result: dict[str, Any] = {
        "engine": type(trainer.collector.rollout.engine).__name__,
        "samples": samples(trainer, mesh),
    }
    native = result["engine"] == "NativeRolloutEngine"
    if native:
        result["right"] = wrong_switches(trainer, mesh, times=0, check_every=2, steps=4)
        result["first only"] = wrong_switches(trainer, mesh, times=0, check_every=0, steps=4)
        result["wrong once"] = wrong_switches(trainer, mesh, times=1, check_every=2, steps=2)
        result["wrong always"] = wrong_switches(trainer, mesh, times=9, check_every=2, steps=2)
        result["no numbers once"] = wrong_switches(trainer, mesh, times=1, check_every=2, steps=2, kind=NoNumbers)
        result["no numbers"] = wrong_switches(trainer, mesh, times=9, check_every=2, steps=2, kind=NoNumbers)
        result["without a name"] = wrong_switches(trainer, mesh, times=9, check_every=2, steps=1, kind=Wrong)
    elif config.layout.tp == 2:
        result["broken once"] = broken_switches(trainer, mesh, times=1, is_moved=False)
        result["broken always"] = broken_switches(trainer, mesh, times=9, is_moved=False)
        result["moved always"] = broken_switches(trainer, mesh, times=9, is_moved=True)
    result["run"] = whole_run(trainer)
    parallel_state.destroy_model_parallel()
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--layouts", nargs="+", required=True, help="NAME=override,override …")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = {}
    for layout in arguments.layouts:
        name, _, overrides = layout.partition("=")
        own = run_layout(arguments.config, overrides.split(",") if overrides else [], arguments.folder / name)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        results[name] = everyone
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(results))
    stop_mesh()


if __name__ == "__main__":
    main()
