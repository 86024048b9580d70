"""One PPO step on one rank, watched inside of its layers. Arguments: --config FILE --folder DIR --out FILE.

`routers`: a model in bfloat16 whose experts are near ties; of every router what came in and what it chose, held against
float64 here. `dropout`: a model with an adapter at `o_proj` alone, whose A and B are identities: what it adds to its
layer, over its scale, is what is left of the layer's inputs.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.nn import functional

from megappo.config.load import load_experiment
from megappo.models.lora import adapters
from megappo.models.router import Router
from megappo.parallel.mesh import start_mesh, stop_mesh
from megappo.trainer.build import build_ppo
from tests.distributed.programs.parity import with_recorded_rollouts

TOP_K = 2
DROPOUT, RANK, ALPHA = 0.25, 32, 64.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    folder = arguments.folder
    lora = [
        f"model.lora.rank={RANK}",
        f"model.lora.alpha={ALPHA}",
        f"model.lora.dropout={DROPOUT}",
        "actor.optim.lr=1e-12",
    ]
    runs: dict[str, tuple[list[str], Callable[[nn.Module], Any]]] = {
        "routers": ([f"model.path={folder / 'ties'}", "model.dtype=bfloat16"], watch_routers),
        "dropout": ([*lora, "model.lora.target_modules=[o_proj]"], watch_dropout),
    }
    results = {}
    for name, (overrides, watch) in runs.items():
        common = [f"trainer.run_dir={folder / name}", "trainer.total_steps=1", "algorithm.adv_estimator=grpo"]
        config = load_experiment(arguments.config, [*overrides, *common])
        mesh = start_mesh(config.layout, seed=0, timeout=timedelta(seconds=120))
        trainer = with_recorded_rollouts(build_ppo(config, mesh))
        found = watch(trainer.actor.engine.model)
        trainer.fit()
        trainer.collector.reward.close()  # type: ignore[union-attr]
        results[name] = found()
        parallel_state.destroy_model_parallel()
    arguments.out.write_text(json.dumps(results))
    stop_mesh()


def watch_routers(model: nn.Module) -> Callable[[], dict[str, Any]]:
    """Sums over the tokens of all routers' passes: choices that differ from float64's, those that logits in bfloat16
    would change, and the largest difference of a weight."""
    sums: dict[str, float] = defaultdict(float)

    def watch(router: Router, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
        hidden, weight = inputs[0].detach().flatten(0, -2), router.weight.detach()
        assert hidden.dtype == torch.bfloat16, "the model computes in bfloat16"
        logits = hidden.double() @ weight.double().T
        scores = logits.softmax(1)
        best = scores.topk(TOP_K, dim=1)
        expected = torch.zeros_like(scores).scatter(1, best.indices, best.values / best.values.sum(1, keepdim=True))
        rounded = logits.bfloat16().topk(TOP_K, dim=1).indices.sort(1).values
        probs, goes = output
        sums["tokens"] += len(hidden)
        sums["wrong"] += int(((expected > 0) != goes).any(1).sum())
        sums["changed_by_rounding"] += int((rounded != best.indices.sort(1).values).any(1).sum())
        sums["weight"] = max(sums["weight"], float((probs.detach().double() - expected).abs().max()))

    for module in model.modules():
        if isinstance(module, Router):
            module.register_forward_hook(watch)  # type: ignore[arg-type]
    return lambda: dict(sums)


def watch_dropout(model: nn.Module) -> Callable[[], dict[str, list[dict[str, float]]]]:
    """Of each pass through an adapted layer, by what it is for: the inputs, the share of them that is left out, and
    how far the others are from the inputs, over the largest of them, at most, if they are (not) scaled."""
    passes: dict[str, list[dict[str, float]]] = {"update": [], "log_probs": [], "reference": []}

    def watch(linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> None:
        given = inputs[0].detach()
        left = (output[0].detach() - functional.linear(given, linear.weight)) / (ALPHA / RANK)
        is_dropped = left.abs() < 1e-5 * given.abs().max()
        kept, size = ~is_dropped & (given != 0), given.abs().max()
        plain = (left - given)[kept].abs()
        scaled = (left - given / (1 - DROPOUT))[kept].abs()
        kind = "update" if torch.is_grad_enabled() else "log_probs" if adapter_of[linear].enabled else "reference"
        passes[kind].append({
            "inputs": given.numel(),
            "dropped": float(is_dropped.double().mean()),
            "plain": float(plain.max() / size) if kept.any() else 0.0,
            "scaled": float(scaled.max() / size) if kept.any() else 0.0,
            "mask": float((is_dropped.flatten() * torch.arange(given.numel())).sum()),
        })  # fmt: skip

    adapter_of = {}
    for _, linear, adapter in adapters(model):
        adapter_of[linear] = adapter
        with torch.no_grad():
            for matrix in (*adapter.lora_A.values(), *adapter.lora_B.values()):
                assert matrix.shape == (RANK, RANK), "the layer has as many inputs and outputs as the adapter has ranks"
                matrix.copy_(torch.eye(RANK))
        linear.register_forward_hook(watch)  # type: ignore[arg-type]
    assert adapter_of, "there are adapters"
    return lambda: passes


if __name__ == "__main__":
    main()
