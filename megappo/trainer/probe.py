"""A probe of the generation engine: a few responses, with its log-probs beside those of the training shards."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megappo.experience.batch import ExperienceBatch
from megappo.experience.sample import Prompt, RolloutSample
from megappo.parallel.collectives import gather_objects, max_over, sum_over
from megappo.parallel.mesh import Mesh
from megappo.workers.actor import ActorWorker
from megappo.workers.rollout import RolloutWorker

# Keeps the noise of probes apart from that of training steps and evaluations.
PROBE_STREAM = 0x70726F6265
PROBE_TOKENS = 8
PROBE_PROMPTS = 4
"""At least; as many as there are replicas, or data-parallel ranks, where these are more."""


@dataclass(frozen=True)
class Probe:
    """How far the engine's log-probs are from the trainer's, over the tokens of all ranks, in nats; infinite where one
    is no number. `worst` is this rank's worst token; None where the engine could sample none."""

    mean: float
    max: float
    worst: TokenDifference | None


@dataclass(frozen=True)
class TokenDifference:
    """One response token, and its log-prob in the engine and in the trainer."""

    source: str
    prompt: int
    place: int
    token_id: int
    engine: float
    trainer: float
    difference: float

    def __str__(self) -> str:
        return (
            f"prompt {self.prompt} of {self.source}, response token {self.place} (id {self.token_id}): "
            f"{self.engine:.6g} in the engine, {self.trainer:.6g} in the trainer"
        )


def probe(rollout: RolloutWorker, actor: ActorWorker, prompts: Sequence[Prompt], mesh: Mesh, step: int) -> Probe:
    """Samples up to `PROBE_TOKENS` tokens to some of the prompts, others at every step. A collective call over the
    world; every replica generates, and every data-parallel rank compares."""
    share = -(-max(PROBE_PROMPTS, mesh.dp, len(rollout.engine.replicas.groups)) // mesh.dp)
    chosen = [prompts[(step * share * mesh.dp + number) % len(prompts)] for number in range(share * mesh.dp)]
    mine = range(mesh.dp_rank * share, (mesh.dp_rank + 1) * share)
    # From the whole distribution: the trainer computes no other log-probs.
    limit = min(PROBE_TOKENS, rollout.sampling.max_tokens)
    sampling = dataclasses.replace(rollout.sampling, max_tokens=limit, top_k=0, top_p=1.0)
    try:
        samples = rollout.sample(chosen, mine, sampling, 1, (PROBE_STREAM, step), with_environment=False)
    except FloatingPointError:  # on all ranks alike
        return Probe(math.inf, math.inf, None)
    batch = ExperienceBatch.from_samples(samples)
    with rollout.memory_lent():
        log_probs = actor.log_probs_now(batch)
    return compare(samples, log_probs[batch.response_mask], mesh)


def compare(samples: Sequence[RolloutSample], trainer: Tensor, mesh: Mesh) -> Probe:
    """`trainer` holds the log-probs of the samples' response tokens, flat. A collective call over the world."""
    engine = torch.tensor([value for sample in samples for value in sample.rollout_log_probs], dtype=torch.float64)
    differences = (trainer.double() - engine).abs().nan_to_num(nan=torch.inf, posinf=torch.inf)
    assert len(differences), "every rank has a response of at least one token"
    local = torch.tensor([float(differences.sum()), len(differences)], dtype=torch.float64)
    total, count = sum_over(mesh.world_group, mesh.device)(local).tolist()
    largest = max_over(mesh.world_group, mesh.device)(differences.max())
    worst = int(differences.argmax())
    places = [(sample, place) for sample in samples for place in range(len(sample.response_ids))]
    sample, place = places[worst]
    return Probe(
        mean=total / count,
        max=float(largest),
        worst=TokenDifference(
            source=sample.prompt.source,
            prompt=sample.prompt.index,
            place=place,
            token_id=sample.response_ids[place],
            engine=float(engine[worst]),
            trainer=float(trainer[worst]),
            difference=float(differences[worst]),
        ),
    )


def worst_of_all(own: TokenDifference | None, mesh: Mesh) -> str:
    """What is said of the worst token of any rank, the same on every rank. A collective call over the world."""
    tokens = [token for token in gather_objects(own, mesh.world_group) if token is not None]
    if not tokens:
        return "none, for the engine's logits are no numbers"
    return str(max(tokens, key=lambda token: token.difference))
