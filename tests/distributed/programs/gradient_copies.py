"""Bytes of the gradients that Megatron's optimizer copies for a step, while it steps and afterwards, on two ranks; and
what is trained then, against Megatron's own calls alone."""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import argparse
import gc
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megappo.algorithms.aggregate import Denominators
from megappo.config.layout import LayoutConfig
from megappo.config.lora import LoraConfig
from megappo.config.offload import OffloadConfig
from megappo.config.optim import OptimConfig
from megappo.engines.optimizer import Optimizer
from megappo.engines.training import TrainingEngine
from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import micro_batches
from megappo.models.attach_lora import attach_lora
from megappo.models.build import build_model, read_model
from megappo.models.import_hf import import_hf
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import start_mesh, stop_mesh
from megappo.trainer.sft import SupervisedLoss
from megappo.workers.policy import LogProbs
from tests.distributed.programs.offload import contents

EVERYTHING = OffloadConfig(params=True, grads=True, optimizer=True)
SEQUENCES, PROMPT, LENGTH = 4, 5, 20


@dataclass(frozen=True)
class Case:
    """A model on two ranks, its optimizer, and adapters where they alone are trained."""

    model: str
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    is_distributed: bool = True
    in_fp32: bool = False
    lora: LoraConfig | None = None


CASES = {
    "dp2": Case("dense"),
    "dp2-all-reduce": Case("dense", is_distributed=False),
    "dp2-fp32": Case("dense", in_fp32=True),
    "dp2-all-reduce-fp32": Case("dense", is_distributed=False, in_fp32=True),
    "dp2-lora": Case("dense", lora=LoraConfig(rank=4, target_modules=("o_proj", "down_proj"))),
    "ep2": Case("moe", LayoutConfig(ep=2)),
    "pp2-vpp2": Case("dense", LayoutConfig(pp=2, vpp=2)),
}


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Bytes of each storage once."""
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}


def copied_bytes(optimizer: Optimizer) -> int:
    """Of gradients that the stepped parameters have beside the buffers."""
    stepped = [param for inner in optimizer._inner() for group in inner.param_groups for param in group["params"]]
    found = storages(param.grad for param in stepped if param.grad is not None)
    buffers = storages(optimizer._gradient_buffers())
    return sum(size for key, size in found.items() if key not in buffers)


def live_bytes() -> int:
    """Of all tensors of numbers in this process and their gradients; what is moved to the host lies there as bytes."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, Tensor) and each.is_floating_point()]
    tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
    return sum(storages(tensors).values())


def megatrons_step(optimizer: Optimizer) -> float:
    """Optimizer.step by Megatron's calls alone: gradients stay until the next update."""
    optimizer.memory.need("optimizer")
    inner: Any = optimizer._optimizer
    inner.prepare_grads()
    norm = float(inner.get_grad_norm())
    inner.step()
    optimizer._schedule.step(1)
    return norm


def train(folder: Path, case: Case, *, is_reference: bool) -> dict[str, Any]:
    mesh = start_mesh(case.layout, seed=0, timeout=timedelta(seconds=120))
    before = live_bytes()
    spec = read_model(folder / case.model)
    model = build_model(spec, mesh, dtype=torch.bfloat16, layers="torch", head="lm")
    import_hf(model, spec, mesh)
    if case.lora is not None:
        attach_lora(model, spec, mesh, case.lora, "lm", seed=0)
    config = OptimConfig(lr=1e-2, grad_reduce_in_fp32=case.in_fp32, use_distributed_optimizer=case.is_distributed)
    optimizer = Optimizer(model, config, 10, EVERYTHING)
    engine = TrainingEngine(mesh, optimizer)
    while_stepping = []
    step = optimizer._optimizer.step

    def watched() -> Any:
        result = step()
        while_stepping.append(copied_bytes(optimizer))
        return result

    optimizer._optimizer.step = watched
    if is_reference:
        optimizer.step = lambda: megatrons_step(optimizer)  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(mesh.dp_rank)
    loss = SupervisedLoss(
        LogProbs(mesh, 128, 1.0, 64), Denominators(SEQUENCES * mesh.dp * (LENGTH - PROMPT), SEQUENCES * mesh.dp)
    )
    for _ in range(3):
        tokens = torch.randint(4, 128, (SEQUENCES, LENGTH), generator=generator).tolist()
        batch = ExperienceBatch.from_sequences(tokens, [PROMPT] * SEQUENCES, range(SEQUENCES))
        engine.update(micro_batches(batch, 2, device=mesh.device), loss)
    after = copied_bytes(optimizer)
    optimizer.memory.rest()
    found = {"while stepping": while_stepping[-1], "after": after, "resting": live_bytes() - before}
    ranks = gather_objects(found | {"trained": contents(optimizer)}, mesh.world_group)
    parallel_state.destroy_model_parallel()
    return {key: [rank[key] for rank in ranks] for key in ranks[0]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = {}
    for name, case in CASES.items():
        results[name] = train(arguments.models, case, is_reference=False)
        results[f"{name}, by Megatron"] = train(arguments.models, case, is_reference=True)
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(results))
    stop_mesh()


if __name__ == "__main__":
    main()
