"""The generation side of a run: which engine, on which ranks, sampling how. An engine is imported when it is chosen."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from megappo.config.experiment import ExperimentConfig
from megappo.config.hybrid import default_check_limit
from megappo.data.replies import ReplyEncoder
from megappo.data.tokenizer import Tokenizer
from megappo.engines.offload import RoleMemory
from megappo.engines.rollout import RolloutEngine, SamplingParams
from megappo.environments.environment import Environment
from megappo.environments.load import load_environment
from megappo.models.architecture import ModelSpec
from megappo.models.chunks import unwrapped
from megappo.models.routing import moe_layers
from megappo.models.sharded import whole_parameters
from megappo.parallel.mesh import Mesh
from megappo.trainer.native_engine import native_engine
from megappo.trainer.roles import DTYPES
from megappo.workers.rollout import OnSample, RolloutWorker
from megappo.workers.turns import ReplicaRanks, TurnTaking


def rollout_worker(
    config: ExperimentConfig,
    mesh: Mesh,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    model: nn.Module,
    on_sample: OnSample | None = None,
    memory: RoleMemory | None = None,
) -> RolloutWorker:
    """The worker around the engine of the experiment, which gets its weights from `model`, this rank's stage; `memory`
    is where they are."""
    environment = multi_turn_environment(config)  # before the engine: a wrong name is told at once
    with whole_parameters(unwrapped(model)):  # an engine keeps views of them, also while there is nothing in them
        engine = rollout_engine(config, mesh, spec, tokenizer, model)
    moe = spec.shape.moe if records_experts(config) else None
    return RolloutWorker(
        engine,
        training_sampling(config),
        mesh,
        num_samples=config.rollout.n,
        seed=config.trainer.seed,
        on_sample=on_sample,
        weights=memory,
        turns=None if environment is None else turn_taking(config, environment, engine, tokenizer, mesh),
        experts=None if moe is None else (len(moe_layers(moe, spec.shape.num_layers)), moe.top_k),
    )


def multi_turn_environment(config: ExperimentConfig) -> Callable[..., Environment] | None:
    """The environment's class where responses have several turns. Raises ConfigError."""
    turns = config.rollout.multi_turn
    if not turns.enable:
        return None
    assert turns.environment is not None, "checked by require_sound"
    return load_environment(turns.environment)


def turn_taking(
    config: ExperimentConfig,
    environment: Callable[..., Environment],
    engine: RolloutEngine,
    tokenizer: Tokenizer,
    mesh: Mesh,
) -> TurnTaking:
    """The turns of a run; makes a process group for each replica of several ranks. A collective call."""
    own = engine.replicas.groups[engine.replicas.of(mesh.rank)]
    groups = {ranks: dist.new_group(ranks, backend="gloo") for ranks in engine.replicas.groups if len(ranks) > 1}
    ranks = ReplicaRanks(mesh.rank, own[0], groups.get(own))
    return TurnTaking(config.rollout.multi_turn, environment, ReplyEncoder(tokenizer), tokenizer.decode, ranks)


def rollout_engine(
    config: ExperimentConfig, mesh: Mesh, spec: ModelSpec, tokenizer: Tokenizer, model: nn.Module
) -> RolloutEngine:
    """vLLM; or the native engine, on the training shards where they are the generation layout too."""
    if config.rollout.engine == "vllm":
        return _vllm_engine(config, mesh, spec, tokenizer, model)
    return native_engine(
        model,
        spec,
        mesh,
        tokenizer,
        tp=config.generation_tp if config.generates_in_own_layout else None,
        max_num_seqs=config.rollout.max_num_seqs,
        max_num_batched_tokens=config.rollout.max_num_batched_tokens,
        bucket_bytes=config.hybrid.bucket_bytes,
        records_experts=records_experts(config),
        pipeline_micro_batches=config.rollout.pipeline_micro_batches,
    )


def records_experts(config: ExperimentConfig) -> bool:
    """Whether completions bring along which experts their tokens went to."""
    return config.actor.router_replay == "rollout"


def training_sampling(config: ExperimentConfig) -> SamplingParams:
    """How training responses are sampled: from the whole distribution, whose log-probs the trainer computes, unless
    the engine's log-probs are taken (`bypass_mode`)."""
    return SamplingParams(
        temperature=config.rollout.temperature,
        top_k=config.rollout.top_k,
        top_p=config.rollout.top_p,
        max_tokens=config.data.max_response_length,
        stop=config.rollout.stop,
        ignore_eos=config.rollout.ignore_eos,
    )


def check_limit(config: ExperimentConfig) -> float:
    """Largest mean |difference| of log-probs between engine and trainer, in nats."""
    quantization = config.rollout.quantization if config.rollout.engine == "vllm" else None
    return config.hybrid.check_limit or default_check_limit(config.model.dtype, quantization)


def _vllm_engine(
    config: ExperimentConfig, mesh: Mesh, spec: ModelSpec, tokenizer: Tokenizer, model: nn.Module
) -> RolloutEngine:
    from megappo.engines.vllm_rollout import VLLMRolloutEngine  # here: only this needs vLLM

    return VLLMRolloutEngine(
        model,
        spec,
        mesh,
        config.rollout,
        dtype=DTYPES[config.model.dtype],
        decode=tokenizer.decode,
        eos_ids=tokenizer.eos_ids,
        tokenizer_folder=config.model.tokenizer_folder,
        max_model_len=config.max_length,
        weights=config.hybrid.weights,
        seed=config.trainer.seed,
        bucket_bytes=config.hybrid.bucket_bytes,
        records_experts=records_experts(config),
    )
