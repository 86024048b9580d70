"""One minibatch of ragged sequences through actor and critic: padded, packed, and cut by tokens, on one rank or two.

Rank 0 of two data-parallel ranks has five times the tokens of rank 1, which has fewer sequences than micro-batches.
Leaves every number that the ways are compared by.
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import argparse
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megappo.config.actor import ActorConfig, CriticConfig
from megappo.config.layout import LayoutConfig
from megappo.config.optim import OptimConfig
from megappo.engines.optimizer import Optimizer
from megappo.engines.training import TrainingEngine
from megappo.experience.batch import ExperienceBatch
from megappo.models.build import build_model, read_model
from megappo.models.import_hf import import_hf
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import Mesh, start_mesh, stop_mesh
from megappo.workers.actor import ActorWorker, estimated_kl
from megappo.workers.critic import CriticWorker
from megappo.workers.cutting import Cutter
from megappo.workers.pairs import summed
from megappo.workers.policy import LogProbs
from megappo.workers.scores import scored_batch, scores_at_tokens
from tests.distributed.programs.parity import whole_gradients

LIMIT = 40
# Of two ranks the first has 5 sequences and 188 tokens, the second 3 and 37. 1, 2 and 31 are below, at, and one below a
# multiple of the alignment of two TP ranks.
LENGTHS = (40, 31, 40, 39, 38, 1, 2, 34)
FIRST_RANK = 5
PERTURBED = 3
VOCABULARY = 128
PLAIN = OptimConfig(lr=0.0, clip_grad=0.0, use_distributed_optimizer=False)
LAYOUTS = {1: {"one": LayoutConfig()}, 2: {"dp2": LayoutConfig(), "tp2-sp": LayoutConfig(tp=2, sequence_parallel=True)}}


def minibatch() -> ExperienceBatch:
    """Prompts of a third of each sequence; the first has no response."""
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(4, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]
    batch = ExperienceBatch.from_sequences(tokens, [1 + length // 3 for length in LENGTHS], range(len(LENGTHS)))

    def draw(centre: float, spread: float) -> Tensor:
        values = centre + spread * torch.randn(batch.num_tokens, generator=generator)
        return torch.where(batch.response_mask, values, 0.0)

    names = {"old_log_probs": (-4.9, 0.3), "ref_log_probs": (-4.9, 0.3), "advantages": (0.0, 1.0)}
    names |= {"values": (0.0, 0.3), "returns": (0.0, 1.0), "loss_weights": (1.0, 0.2)}
    return batch.fill(**{name: draw(*moments) for name, moments in names.items()})


def cutters(mesh: Mesh) -> dict[str, Cutter]:
    return {
        "padded": Cutter(mesh, 2),
        "packed": Cutter(mesh, 2, packed=True),
        "dynamic": Cutter(mesh, 1, packed=True, max_tokens=LIMIT),
    }


def first_gradients(engine: TrainingEngine, update: Callable[[], dict[str, float]]) -> tuple[dict[str, Tensor], Any]:
    """Gradients of one update, by parameter, and its metrics."""
    found: dict[str, Tensor] = {}
    step = engine.optimizer.step

    def kept() -> float:
        names = {parameter: name for name, parameter in engine.optimizer.wrapped.module.named_parameters()}
        found.update({names[parameter]: value for parameter, value in whole_gradients(engine.optimizer).items()})
        return step()

    engine.optimizer.step = kept  # type: ignore[method-assign]
    metrics = update()
    engine.optimizer.step = step  # type: ignore[method-assign]
    return found, metrics


def engine_of(mesh: Mesh, folder: Path, head: Any) -> TrainingEngine:
    spec = read_model(folder)
    model = build_model(spec, mesh, dtype=torch.float32, layers="torch", head=head)
    import_hf(model, spec, mesh)
    return TrainingEngine(mesh, Optimizer(model, PLAIN, 1))


def run_layout(mesh: Mesh, models: Path) -> dict[str, Any]:
    actor_engine, critic_engine = engine_of(mesh, models / "actor", "lm"), engine_of(mesh, models / "critic", "value")
    log_probs = LogProbs(mesh=mesh, vocab_size=VOCABULARY, temperature=0.8, chunk_tokens=16)
    batch = minibatch()
    if mesh.dp == 2:
        batch = batch.taken(range(FIRST_RANK) if mesh.dp_rank == 0 else range(FIRST_RANK, len(LENGTHS)))
    results: dict[str, Any] = {}
    for name, cut in cutters(mesh).items():
        if mesh.dp == 2 and name != "dynamic":
            continue  # the ranks have different numbers of sequences
        counts = gather_objects([micro.rows.num_tokens for micro in cut(batch).micros], mesh.dp_group)
        critic = CriticWorker(critic_engine, CriticConfig(), update_cut=cut, forward_cut=cut, scale_length=7)
        gradients, metrics = first_gradients(critic_engine, lambda: critic.update(batch))  # noqa: B023
        result = {"tokens": counts, "values": critic.fill_values(batch).get("values"), "critic": (gradients, metrics)}
        result["scores"] = scores(critic_engine, cut, batch)
        for kind, config in actor_configs().items():
            actor = ActorWorker(
                actor_engine, config, log_probs, scale_length=7, update_cut=cut, forward_cut=cut,
                kl_term=estimated_kl("low_var_kl"),
            )  # fmt: skip
            result[kind] = first_gradients(actor_engine, lambda: actor.update(batch))  # noqa: B023
        result["log_probs"] = actor.log_probs_now(batch)
        result["perturbed"] = actor.log_probs_now(perturbed(batch))
        results[name] = result
    return results


def actor_configs() -> dict[str, ActorConfig]:
    both = {"use_kl_loss": True, "kl_loss_coef": 0.1, "entropy_coeff": 0.01}
    return {
        "vanilla": ActorConfig.model_validate(both),
        "gspo": ActorConfig.model_validate(both | {"policy_loss": {"loss_mode": "gspo"}}),
    }


def scores(engine: TrainingEngine, cut: Cutter, batch: ExperienceBatch) -> Tensor:
    """[sequences]: what the value head says at the last token of each, as a reward model."""
    ends = batch.cu_seqlens.tolist()
    scored = scored_batch([batch.token_ids[a:b].tolist() for a, b in pairwise(ends)], pad_id=None)
    made = cut(scored)
    return summed(scored, made.restored(engine.per_token(made.micros, scores_at_tokens)))


def perturbed(batch: ExperienceBatch) -> ExperienceBatch:
    """The same with other tokens in one sequence."""
    row = batch.positions.tolist().index(PERTURBED) if PERTURBED in batch.positions else None
    if row is None:
        return batch
    tokens, places = batch.token_ids.clone(), batch.token_places([row])
    tokens[places] = (tokens[places] + 17) % VOCABULARY
    return replace(batch, token_ids=tokens)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    for name, layout in LAYOUTS[arguments.ranks].items():
        mesh = start_mesh(layout, seed=0, timeout=timedelta(seconds=60))
        results = run_layout(mesh, arguments.models)
        torch.save(results, arguments.models / f"{name}-{dist.get_rank()}.pt")
        parallel_state.destroy_model_parallel()
    dist.barrier()
    stop_mesh()


if __name__ == "__main__":
    main()
