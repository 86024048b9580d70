"""Responses to prompts without training: an engine on the ranks that hold a model, and prompts dealt to replicas."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from megappo.config.experiment import ExperimentConfig
from megappo.config.grid import TrainingGrid, generation_problem
from megappo.config.hybrid import HybridConfig
from megappo.data.tokenizer import Tokenizer
from megappo.engines.native.check import generation_size_fits
from megappo.engines.requests import check_requests
from megappo.engines.rollout import Completion, GenerationRequest, Progress, RolloutEngine, SamplingParams
from megappo.models.architecture import ModelSpec
from megappo.models.chunks import StageModel
from megappo.models.families.base import ModelShape
from megappo.parallel.collectives import gather_objects
from megappo.parallel.mesh import Mesh
from megappo.trainer.native_engine import native_engine

MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 8192


def replica_size(shape: ModelShape, training: TrainingGrid) -> int | None:
    """Ranks that generate together; None where they do so on the shards as they lie.

    The native engine decodes on no experts that data-parallel ranks share: then all ranks that hold one copy of the
    experts, of all stages, are one replica, or as many of them as the model's heads, rows and experts divide over.
    """
    if training.ep == 1 and training.tp % training.etp == 0:
        return None
    whole = lcm(training.tp, training.ep * training.etp) * training.pp
    sizes = [size for size in range(1, whole + 1) if whole % size == 0 and generation_size_fits(shape, size)]
    return max(size for size in sizes if generation_problem(training, size) is None)


def with_whole_replicas(config: ExperimentConfig, shape: ModelShape, training: TrainingGrid) -> ExperimentConfig:
    """The experiment, whose native engine generates on replicas of `replica_size` where their size is left open and
    the layout's own would hold all experts on each TP group."""
    size = replica_size(shape, training)
    if size is None or config.rollout.engine != "native" or config.rollout.tensor_model_parallel_size is not None:
        return config
    rollout = config.rollout.model_copy(update={"tensor_model_parallel_size": size})
    return config.model_copy(update={"rollout": rollout})


def answering_engine(model: StageModel, spec: ModelSpec, mesh: Mesh, tokenizer: Tokenizer) -> RolloutEngine:
    """The native engine around a policy that is not trained. A collective call."""
    return native_engine(
        model,
        spec,
        mesh,
        tokenizer,
        tp=replica_size(spec.shape, mesh.training_grid),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        bucket_bytes=HybridConfig().bucket_bytes,
    )


def answers(
    engine: RolloutEngine,
    spec: ModelSpec,
    mesh: Mesh,
    requests: Sequence[GenerationRequest],
    num_samples: int,
    sampling: SamplingParams,
    progress: Progress | None = None,
) -> list[Completion]:
    """Completions in the order of `requests`, the same on every rank. A collective call over the world.

    The `num_samples` requests of a prompt follow each other and stay together; replicas take the prompts in turn, and
    one may have none. Raises DataError or ConfigError, on every rank, for a request that can't be answered.
    """
    check_requests(requests, sampling, spec.shape.vocab_size, spec.shape.max_positions)
    groups = engine.replicas.groups
    own = engine.replicas.of(mesh.rank)
    mine = [number for number in range(len(requests)) if number // num_samples % len(groups) == own]
    engine.sync_weights()
    completions = engine.generate([requests[number] for number in mine], sampling, _scaled(progress, len(requests)))
    engine.release()
    if len(groups) == 1:
        return completions
    told = dict(zip(mine, completions, strict=True)) if mesh.rank == groups[own][0] else {}
    found = {number: one for part in gather_objects(told, mesh.world_group) for number, one in part.items()}
    return [found[number] for number in range(len(requests))]


def _scaled(progress: Progress | None, total: int) -> Progress | None:
    """Progress over all `total` responses, as far as a replica can tell: the others have as many to do."""
    return None if progress is None else lambda done, own: progress(done * total // own, total)
