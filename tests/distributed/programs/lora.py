"""A run with adapters, looked at from inside: what the first forward computes, what switches leave, what memory holds.

Writes to `--folder`: `adapter` and `merged` (the exports of random adapters), and log-probs of random tokens.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import argparse
import hashlib
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter

from megappo.config.load import load_experiment
from megappo.engines.hybrid.execute import Moved
from megappo.engines.hybrid.stream import hf_tensors
from megappo.engines.optimizer import Optimizer
from megappo.engines.optimizer_states import create_state
from megappo.engines.rollout import GenerationRequest, SamplingParams
from megappo.models.attach_lora import Merge
from megappo.models.expert_lora import expert_adapters
from megappo.models.export_adapter import export_adapter
from megappo.models.export_hf import export_hf
from megappo.models.import_adapter import import_adapter
from megappo.models.lora import adapters, adapters_off
from megappo.models.recompute import keep_gradient_path
from megappo.models.stage_parameters import stage_parameters
from megappo.parallel.mesh import start_mesh, stop_mesh
from megappo.trainer.build import build_ppo
from megappo.trainer.collect import Collector
from megappo.trainer.ppo import PPOTrainer
from megappo.workers.reference import ReferenceWorker
from tests.support.adapters import fill_adapters

NUM_SWITCHES = 100


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--overrides", nargs="*", default=[])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.folder.mkdir(exist_ok=True)
    config = load_experiment(arguments.config, [*arguments.overrides, f"trainer.run_dir={arguments.folder / 'run'}"])
    mesh = start_mesh(config.layout, seed=0, timeout=timedelta(seconds=120))
    trainer = build_ppo(config, mesh)
    model, spec = trainer.actor.engine.optimizer.wrapped.module, trainer.loop._parts.spec
    result: dict[str, Any] = {"bytes": held_bytes(trainer)}
    if config.model.lora.is_used and mesh.world_size == 1:
        tokens = torch.randint(4, 99, (2, 20), generator=torch.Generator().manual_seed(0))
        with adapters_off(model):
            base = forward(model, tokens)
        result["equal_at_start"] = torch.equal(base, forward(model, tokens))
        result["merged_is_base_at_start"] = merged_is_base(model, spec)
        fill_adapters(model, spec, mesh)
        disturb_other_rows(model)
        result["change"] = float((forward(model, tokens) - base).abs().max())
        with adapters_off(model):
            result["equal_when_off"] = torch.equal(base, forward(model, tokens))
        difference = merged_difference(model, spec, tokens)
        result["merged_difference"], result["merged_mean"] = float(difference.max()), float(difference.mean())
        result["recomputed_equal"] = recomputed_equal(trainer.actor.engine.optimizer, tokens)
        others = [float(tensor.main_grad.masked_fill(mask, 0).abs().max()) for tensor, mask in row_masks(model)]
        result["other_gradient"] = max(others, default=0.0)  # experts' adapters have rows of their own alone
        save_file({"tokens": tokens, "log_probs": forward(model, tokens)}, arguments.folder / "forward.safetensors")
        export_adapter(model, spec, mesh, arguments.folder / "adapter")
        export_hf(model, spec, mesh, arguments.folder / "merged")
        before = forward(model, tokens)
        fill_adapters(model, spec, mesh, seed=1)
        import_adapter(model, spec, mesh, arguments.folder / "adapter", "lm", "model.lora")
        result["equal_when_read_back"] = torch.equal(before, forward(model, tokens))
        # What vLLM's own loader is given.
        streamed, merged = (
            hf_tensors(model, spec, mesh, Moved()),
            load_file(arguments.folder / "merged/model.safetensors"),
        )
        result["stream_is_merged"] = (
            all(torch.equal(merged.pop(name), tensor) for name, tensor in streamed) and not merged
        )
    if config.model.lora.is_used:
        before = fingerprint(model)
        result["probes"], result["bytes_copied"] = turns(trainer, model, spec, mesh)
        result["adapted_bytes"] = adapted_bytes(model)
        result["base_is_unchanged"] = fingerprint(model) == before
    trainer.collector.reward.close()  # type: ignore[union-attr]
    if mesh.is_writer:
        arguments.out.write_text(json.dumps(result))
    stop_mesh()


@torch.no_grad()
def forward(model: GPTModel, tokens: Tensor) -> Tensor:
    """[b, s, vocabulary] log-probs."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    return model(tokens, positions, None).float().log_softmax(-1)


def row_masks(model: GPTModel) -> Iterator[tuple[Parameter, Tensor]]:
    """Each B and each magnitude of the model's linear layers, and where its rows are of projections with an adapter."""
    for _, _, adapter in adapters(model):
        for kind in (adapter.lora_B, adapter.magnitude):
            sizes = [len(parameter) for parameter in kind.values()]
            for parameter, mask in zip(kind.values(), adapter._has_adapter.split(sizes) if sizes else (), strict=True):
                yield parameter, mask[:, None] if parameter.dim() == 2 else mask


@torch.no_grad()
def disturb_other_rows(model: GPTModel) -> None:
    """Numbers where an adapter of a fused layer has rows of a projection without one: nothing may read them."""
    for parameter, mask in row_masks(model):
        parameter.masked_fill_(~mask, 3.0)


def merged_is_base(model: GPTModel, spec: Any) -> bool:
    """Whether merging changes no bit."""
    merge = Merge(model)
    items = [item for item in stage_parameters(model, spec.family.weight_map(spec.shape, "lm")) if merge.changes(item)]
    return len(items) > 0 and all(torch.equal(merge(item), item.tensor) for item in items)


def merged_difference(model: GPTModel, spec: Any, tokens: Tensor) -> Tensor:
    """How far each log-prob of adapters beside the weights is from that of weights with them merged in, in a copy."""
    unmerged = forward(model, tokens)
    merge = Merge(model)
    items = [item for item in stage_parameters(model, spec.family.weight_map(spec.shape, "lm")) if merge.changes(item)]
    kept = [item.tensor.detach().clone() for item in items]
    merged = [merge(item) for item in items]
    for item, weight in zip(items, merged, strict=True):
        item.tensor.data.copy_(weight)
    with adapters_off(model):
        difference = (forward(model, tokens) - unmerged).abs()
    for item, weight in zip(items, kept, strict=True):
        item.tensor.data.copy_(weight)
    return difference


def recomputed_equal(optimizer: Optimizer, tokens: Tensor) -> bool:
    """Whether adapters have the same gradients where layers are computed again in the backward pass."""
    model = optimizer.wrapped.module
    model.embedding.register_forward_hook(keep_gradient_path)  # as in a model that is built with recompute
    gradients = []
    for granularity in (None, "full"):
        model.config.recompute_granularity = granularity
        model.config.recompute_method, model.config.recompute_num_layers = "uniform", 1
        optimizer.zero_grad()
        model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None).float().log_softmax(-1)[
            ..., 0
        ].sum().backward()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradients.append(torch.cat([parameter.main_grad.flatten().clone() for parameter in trained]))
    model.config.recompute_granularity = None
    assert float(gradients[0].norm()) > 0
    return torch.equal(*gradients)


def fingerprint(model: GPTModel) -> str:
    """Of the bits of every frozen parameter."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def turns(trainer: PPOTrainer, model: GPTModel, spec: Any, mesh: Any) -> tuple[list[float], int]:
    """Switches back and forth, adapters changing in between; the probe's differences of the first and last, and the
    bytes that a switch copied on this rank."""
    collector = trainer.collector
    assert isinstance(collector, Collector)
    switch, engine = collector.switch, collector.rollout.engine
    found, copied = [], 0
    for turn in range(NUM_SWITCHES):
        if turn in (0, NUM_SWITCHES - 1):
            switch._is_first = True
            found.append(switch.to_rollout(1 + turn)["hybrid/probe_diff_max"])
        else:
            copied = engine.sync_weights().bytes_copied
        engine.generate([GenerationRequest((5, 6, 7), turn)], SamplingParams(max_tokens=1))
        switch.to_training()
        fill_adapters(model, spec, mesh, seed=turn, size=0.02)
    return found, copied


def adapted_bytes(model: GPTModel) -> int:
    """Bytes of the frozen weights that adapters stand beside on this rank."""
    linears = sum(linear.weight.nbytes for _, linear, _ in adapters(model))
    return linears + sum(weight.nbytes for weight, _ in expert_adapters(model))


def held_bytes(trainer: PPOTrainer) -> dict[str, int]:
    """Bytes of the actor's gradients and optimizer state, and of a reference of its own."""
    optimizer: Optimizer = trainer.actor.engine.optimizer
    for inner in optimizer._inner():
        create_state(inner)
    state = sum(
        value.nbytes
        for inner in optimizer._inner()
        for values in inner.state.values()
        for key, value in values.items()
        if key != "step"
    )
    wrapped = optimizer.wrapped
    buffers = wrapped.buffers + wrapped.expert_parallel_buffers
    reference = trainer.reference
    assert isinstance(reference, ReferenceWorker)
    is_own = adapted_bytes(reference.engine.model) == 0
    return {
        "optimizer": state,
        "gradients": sum(buffer.grad_data.nbytes for buffer in buffers),
        "reference": sum(parameter.nbytes for parameter in reference.engine.model.parameters()) if is_own else 0,
    }


if __name__ == "__main__":
    main()
