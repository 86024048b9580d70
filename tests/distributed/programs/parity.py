"""Three PPO steps of the product's own loop on recorded rollouts, on any layout.

Leaves gradients, weights and metrics. A run named `…+sp-norm` drops the all-reduce of replicated norm weights under
sequence parallelism, `…+tied-embedding` that of a tied embedding over pipeline stages, `…+expert-copies` that of
experts over TP ranks that hold copies of them: the comparison must see all three. `…+threes` cuts three sequences where
it is told two, which leaves an odd number of micro-batches. A run named `native…` generates with its own engine.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import argparse
import contextlib
import dataclasses
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megappo.config.load import load_experiment
from megappo.engines.optimizer import Optimizer
from megappo.engines.rollout import Progress, SamplingParams
from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import MicroBatch, micro_batches
from megappo.experience.sample import Prompt, RolloutSample
from megappo.models import build
from megappo.models.attach_lora import attached_lora
from megappo.models.build import ModelSpec, read_model
from megappo.models.export_adapter import export_adapter
from megappo.models.export_hf import export_hf
from megappo.models.routing import EXPERT_DTYPE, NO_EXPERT
from megappo.models.sharded import Shards, shards_of, whole_parameters
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh
from megappo.trainer.baseline import GreedyBaseline
from megappo.trainer.build import build_ppo
from megappo.trainer.collect import Collector
from megappo.trainer.ppo import PPOTrainer
from megappo.workers import cutting
from megappo.workers.critic import CriticWorker
from tests.support.adapters import fill_adapters

VOCABULARY = 99  # the characters that the tiny tokenizer knows


class RecordedRollouts:
    """Stands for the rollout worker: the same samples on every layout, of ragged lengths, one of them empty.

    `experts`: layers, experts and top_k of recorded choices, which are drawn at random and so no router's own.
    """

    sampling = SamplingParams()

    def __init__(self, experts: tuple[int, int, int] | None = None) -> None:
        self._experts = experts

    def generate(
        self,
        prompts: Sequence[Prompt],
        positions: Sequence[int],
        step: int,
        progress: Progress | None = None,
        batch: int = 0,
    ) -> list[RolloutSample]:
        n = 2
        return [self._sample(prompts[position // n], position, position % n, step) for position in positions]

    def sample(
        self,
        prompts: Sequence[Prompt],
        positions: Sequence[int],
        sampling: SamplingParams,
        num_samples: int,
        stream: tuple[int, ...],
    ) -> list[RolloutSample]:
        """Greedy responses, which are others than any step's."""
        assert num_samples == 1 and sampling.temperature == 0
        return [self._sample(prompts[position], position, 0, 100 + stream[-1]) for position in positions]

    def turn_metrics(self, samples: Sequence[RolloutSample]) -> dict[str, float]:
        return {}

    def _sample(self, prompt: Prompt, position: int, sample: int, step: int) -> RolloutSample:
        draw = random.Random(1000 * step + position)
        length = 0 if position == 5 else draw.randint(1, 12)
        ids = tuple(draw.randrange(4, VOCABULARY) for _ in range(length))
        log_probs = tuple(-draw.random() for _ in ids)
        text = "".join(chr(28 + token) for token in ids)
        made = RolloutSample(prompt, position, sample, ids, log_probs, text, "length")
        if self._experts is None:
            return made
        layers, num_experts, top_k = self._experts
        generator = torch.Generator().manual_seed(1000 * step + position)
        experts = torch.rand(made.length, layers, num_experts, generator=generator).argsort(-1)[..., :top_k]
        experts[-1] = NO_EXPERT
        return dataclasses.replace(made, routed_experts=experts.to(EXPERT_DTYPE))


class NoSwitch:
    """Stands for the switch of weights, for which recorded rollouts have no use."""

    def to_rollout(self, step: int) -> dict[str, float]:
        return {}

    def to_training(self) -> None:
        pass


@contextlib.contextmanager
def broken(kind: str | None) -> Any:
    """Megatron without one of its gradient reductions."""
    import importlib

    # The package exports a function of the module's name.
    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    name = {
        "sp-norm": "_allreduce_non_tensor_model_parallel_grads",
        "tied-embedding": "_allreduce_word_embedding_grads",
    }
    if kind is None:
        yield
    elif kind == "threes":
        with replaced(cutting, "micro_batches", _in_threes):
            yield
    elif kind == "expert-copies":
        with replaced(build, "_mark_shards", _without_expert_groups(build._mark_shards)):
            yield
    else:
        with replaced(module, name[kind], lambda *arguments, **options: None):
            yield


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def _in_threes(batch: ExperienceBatch, size: int, **options: Any) -> list[MicroBatch]:
    return micro_batches(batch, 3 if size == 2 else size, **options)


def _without_expert_groups(mark: Callable[..., None]) -> Callable[..., None]:
    """Every parameter is reduced over the dense weights' data-parallel group, as Megatron does it at EP 1."""

    def marked(model: torch.nn.Module, *arguments: Any) -> None:
        mark(model, *arguments)
        for parameter in model.parameters():
            parameter.allreduce = True  # type: ignore[attr-defined]

    return marked


def whole_gradients(optimizer: Optimizer) -> dict[torch.nn.Parameter, torch.Tensor]:
    """The reduced gradient of each parameter, also where data-parallel ranks hold a shard of each bucket."""
    wrapped = optimizer.wrapped
    shards = shards_of(wrapped.module)
    if shards is not None:
        return _gathered_gradients(shards)
    if optimizer.chunks[0].ddp_config.use_distributed_optimizer:
        for buffer in (
            buffer for chunk in optimizer.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers
        ):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shard = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)
    parameters = list(wrapped.module.parameters())
    # With adapters the frozen weights are left out; alone, as DeepSeek's correction bias, one has no gradient.
    has_adapters = any(".lora_" in name for name, _ in wrapped.module.named_parameters())
    return {
        parameter: parameter.main_grad.clone() if parameter.requires_grad else torch.zeros_like(parameter)
        for parameter in parameters
        if parameter.requires_grad or not has_adapters
    }


def _gathered_gradients(shards: Shards) -> dict[torch.nn.Parameter, torch.Tensor]:
    """Of a model that is cut: its parts of the gradients joined, for the whole parameters that it holds now."""
    gradients = {}
    for part in shards.parts.values():
        pieces = gather_objects(part.local.main_grad, shards.mesh.dp_group)  # they may differ in length
        gradients[part.module._parameters[part.name]] = torch.cat(pieces, part.axis)
    return gradients


def export_gradients(optimizer: Optimizer, mesh: Mesh, folder: Path, model_path: Path) -> None:
    """Writes the gradients as if they were the weights, so that the weight map names them."""
    with whole_parameters(optimizer.wrapped.module):
        _export_gradients(optimizer, mesh, folder, model_path)


def _export_gradients(optimizer: Optimizer, mesh: Mesh, folder: Path, model_path: Path) -> None:
    gradients = whole_gradients(optimizer)
    weights = {parameter: parameter.detach().clone() for parameter in gradients}
    for parameter, gradient in gradients.items():
        parameter.data.copy_(gradient)
    export_trained(optimizer.wrapped.module, read_model(model_path), mesh, folder)
    for parameter, weight in weights.items():
        parameter.data.copy_(weight)


def export_trained(model: torch.nn.Module, spec: ModelSpec, mesh: Mesh, folder: Path) -> None:
    """The model, or its adapters where these alone are trained."""
    export = export_hf if attached_lora(model) is None else export_adapter
    export(model, spec, mesh, folder)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--runs", nargs="+", required=True, help="NAME[:BREAK]=override,override …")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = {}
    for run in arguments.runs:
        name, _, overrides = run.partition("=")
        # A comma inside of brackets is one of a list.
        parts = re.split(r",(?![^\[]*\])", overrides) if overrides else []
        results[name] = run_once(arguments.config, parts, arguments.folder / name)
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(results))
    stop_mesh()


def run_once(config_file: str, overrides: list[str], folder: Path) -> dict[str, Any]:
    kind = folder.name.partition("+")[2] or None
    config = load_experiment(config_file, [*overrides, f"trainer.run_dir={folder / 'run'}"])
    mesh = start_mesh(config.layout, seed=0, timeout=timedelta(seconds=120))
    model_paths = {"actor": Path(config.model.path), "critic": Path(config.critic.path or config.model.path)}
    with broken(kind):
        trainer = build_ppo(config, mesh)
        if not folder.name.startswith("native"):
            trainer = with_recorded_rollouts(trainer, with_experts=config.actor.router_replay == "rollout")
        roles = {"actor": trainer.actor.engine}
        if isinstance(trainer.critic, CriticWorker):
            roles["critic"] = trainer.critic.engine
        for role, engine in roles.items():
            fill_adapters(engine.optimizer.wrapped.module, read_model(model_paths[role]), mesh)
            _export_first_gradients(engine.optimizer, mesh, folder / f"{role}-gradients", model_paths[role])
        trainer.fit()
    states = {role: optimizer_states(engine.optimizer) for role, engine in roles.items()}
    for role, engine in roles.items():
        engine.memory.need_whole()
        export_trained(engine.optimizer.wrapped.module, read_model(model_paths[role]), mesh, folder / f"{role}-weights")
    trainer.collector.reward.close()  # type: ignore[union-attr]
    # The default group stays: torchrun's store does not take a second one with the same names.
    parallel_state.destroy_model_parallel()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines() if mesh.is_writer else []
    return {"metrics": [json.loads(line) for line in lines], "states": states}


def optimizer_states(optimizer: Optimizer) -> dict[str, Any]:
    """What this rank's optimizer keeps: name → [type, elements, bytes], and the type of the gradients it reads."""
    found: dict[str, list[Any]] = {}
    for state in (state for inner in optimizer._inner() for state in inner.state.values()):
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                elements, size = found.get(name, ["", 0, 0])[1:]
                found[name] = [str(value.dtype), elements + value.numel(), size + value.nbytes]
    trained = [parameter for parameter in optimizer.wrapped.module.parameters() if parameter.requires_grad]
    return found | {
        "grads": sorted({str(gradient.dtype) for gradient in optimizer._gradient_buffers()}),
        "parameters": sum(parameter.numel() for parameter in trained),
        "optimizer": optimizer.kinds[0].__module__ if optimizer.kinds else None,
    }


def with_recorded_rollouts(trainer: PPOTrainer, *, with_experts: bool = False) -> PPOTrainer:
    collector = trainer.collector
    assert isinstance(collector, Collector), "recorded groups are not filtered"
    routing, experts = trainer.actor.engine.routing, None
    if with_experts:
        assert routing is not None, "router replay is for models with experts"
        experts = len(routing.shared.layers), routing.shared.moe.num_experts, routing.shared.moe.top_k
    rollout: Any = RecordedRollouts(experts)
    switch: Any = NoSwitch()
    baseline = collector.baseline
    if isinstance(baseline, GreedyBaseline):
        baseline = dataclasses.replace(baseline, rollout=rollout)
    recorded = dataclasses.replace(collector, rollout=rollout, switch=switch, baseline=baseline)
    return dataclasses.replace(trainer, collector=recorded)


def _export_first_gradients(optimizer: Optimizer, mesh: Mesh, folder: Path, model_path: Path) -> None:
    """Has the optimizer write its gradients just before its first step."""
    step = optimizer.step

    def first_step() -> float:
        export_gradients(optimizer, mesh, folder, model_path)
        optimizer.step = step  # type: ignore[method-assign]
        return step()

    optimizer.step = first_step  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
