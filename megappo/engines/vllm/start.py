"""Starts a vLLM engine among the ranks of a torchrun world, from a configuration. Says what it can't do before."""

import megappo.parallel.runtime as runtime  # isort: skip  before megatron

import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from megappo.config.checkpoint_names import readable
from megappo.config.grid import GenerationGrid
from megappo.config.rollout import RolloutConfig
from megappo.config.shared_gpus import ranks_per_gpu
from megappo.engines.vllm.environment import has_latent_kernels, prepare_environment
from megappo.engines.vllm.patches import starting
from megappo.engines.vllm.transfer import register_loader
from megappo.errors import ConfigError
from megappo.models.architecture import ModelSpec
from megappo.parallel.collectives import broadcast_object
from megappo.parallel.mesh import Mesh

LOAD_FORMAT = "megappo"
SHARED_MEMORY = Path("/dev/shm")
WITHOUT_LAYERS = ("glm",)
"""Families that vLLM runs in Hugging Face's own modules (0.32.0)."""
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes that vLLM's attention on CPUs has kernels for (0.32.0)."""

LATENT_ON_CPU: dict[str, Any] = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
"""The kernel for RoPE on a CPU takes the part of a head that carries positions for whole heads (0.32.0): log-probs were
3.5 off. Without it vLLM computes RoPE in torch."""


def check_engine(config: RolloutConfig, spec: ModelSpec, max_model_len: int) -> None:
    """ConfigError for what vLLM can't do here, with what can be done instead."""
    prepare_environment()
    shape = spec.shape
    if max_model_len > shape.max_positions:
        raise ConfigError(
            f"rollout.max_model_len: {max_model_len} tokens are more than the {shape.max_positions} positions of "
            f"{spec.folder}; shorten data.max_prompt_length or data.max_response_length"
        )
    yarn = None if shape.latent is None else shape.latent.yarn
    if yarn is not None and max_model_len > yarn.factor * yarn.original_max_positions:
        raise ConfigError(
            f"rollout.max_model_len: {max_model_len} tokens are more than vLLM's RoPE table has positions, "
            f"{yarn.factor:g} times original_max_position_embeddings {yarn.original_max_positions} in {spec.folder}; "
            "shorten data.max_prompt_length or data.max_response_length, or set rollout.engine to native"
        )
    if spec.family.model_type in WITHOUT_LAYERS:
        raise ConfigError(
            f"rollout.engine: vllm has no layers of its own for model_type {spec.family.model_type!r} ({spec.folder}), "
            "whose parameters megappo would know; set it to native"
        )
    if not runtime.on_cpu:
        return
    if shape.latent is not None and has_latent_kernels():
        raise ConfigError(
            "rollout.engine: vllm has kernels on a CPU for latent attention of one size alone, and keeps their weights "
            "packed; leave VLLM_MLA_DISABLE unset, or set it to 1"
        )
    if config.enable_expert_parallel:
        raise ConfigError(
            "rollout.enable_expert_parallel: true ends the process in vLLM on a CPU; set it to false or leave it out"
        )
    if config.quantization is not None:
        raise ConfigError(
            f"rollout.quantization: vLLM has no kernels on a CPU for {config.quantization}; leave it out there"
        )
    if shape.head_dim not in CPU_HEAD_DIMS:
        raise ConfigError(
            f"rollout.engine: vllm has no attention on a CPU for heads of {shape.head_dim} ({spec.folder}), only for "
            f"{', '.join(map(str, CPU_HEAD_DIMS))}; set it to native"
        )


def check_experts(config: RolloutConfig, mesh: Mesh, spec: ModelSpec, tp: int) -> None:
    """ConfigError where whole experts can't be spread evenly over the ranks of a replica, as plans have them: vLLM
    gives some ranks one more, then (0.20.2, 0.32.0)."""
    moe = spec.shape.moe
    if moe is None or not uses_expert_parallel(config, mesh, spec) or moe.num_experts % tp == 0:
        return
    possible = ", ".join(str(size) for size in range(1, tp) if moe.num_experts % size == 0)
    raise ConfigError(
        f"rollout.enable_expert_parallel: {moe.num_experts} experts can't be spread evenly over the {tp} ranks of a "
        f"replica; set it to false, or rollout.tensor_model_parallel_size to one of {possible}"
    )


def start_engine(
    config: RolloutConfig,
    spec: ModelSpec,
    mesh: Mesh,
    grid: GenerationGrid,
    load: Callable[[nn.Module], None],
    *,
    dtype: torch.dtype,
    tokenizer_folder: str | Path,
    max_model_len: int,
    seed: int,
) -> Any:
    """This rank's `vllm.LLM`, in the replica that `grid` says, its model filled by `load`. All ranks call it."""
    from vllm import LLM

    register_loader(LOAD_FORMAT, load)
    token = broadcast_object(uuid.uuid4().hex[:12] if mesh.is_writer else None, mesh.world_group, 0)
    with starting(grid.groups, token):
        llm = LLM(
            str(readable(spec.folder)),
            tokenizer=str(readable(tokenizer_folder)),
            skip_tokenizer_init=not (config.stop or config.multi_turn.enable),
            load_format=LOAD_FORMAT,
            generation_config="vllm",  # not the sampling defaults of the model's folder
            hf_overrides=config_overrides(spec),
            dtype=dtype,
            quantization=config.quantization,
            seed=seed,
            distributed_executor_backend="external_launcher",
            tensor_parallel_size=grid.tp,
            enable_expert_parallel=uses_expert_parallel(config, mesh, spec),
            max_model_len=max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            gpu_memory_utilization=config.gpu_memory_utilization,
            enforce_eager=config.enforce_eager or runtime.on_cpu,
            enable_prefix_caching=config.enable_prefix_caching,
            enable_chunked_prefill=config.enable_chunked_prefill,
            enable_sleep_mode=config.free_cache_engine and not runtime.on_cpu,
            # It writes into the other ranks' GPUs.
            disable_custom_all_reduce=ranks_per_gpu() > 1,
            # Each rank of a replica schedules alone and has to come to the same; asynchronously, 0.20.2 asks the clock.
            async_scheduling=False if grid.tp > 1 else None,
            # Other backends (FlashInfer) swap or repack the experts' matrices, which then could not be written in place
            **({"moe_backend": "triton"} if spec.shape.moe is not None and not runtime.on_cpu else {}),
            **(LATENT_ON_CPU if spec.shape.latent is not None and runtime.on_cpu else {}),
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
        )
    _forget_shared_memory(token)
    return llm


def config_overrides(spec: ModelSpec) -> dict[str, Any]:
    """Keys for `config.json`. Hugging Face's classes of DeepSeek imply how a router chooses, and save no key of it;
    where one is missing, vLLM takes another way without a word (0.32.0)."""
    shape = spec.shape
    if shape.latent is None or shape.moe is None:
        return {}
    moe = shape.moe
    method = "group_limited_greedy" if moe.num_groups > 1 else "greedy"
    return {
        "scoring_func": moe.score,
        "topk_method": "noaux_tc" if moe.has_bias else method,
        "norm_topk_prob": moe.norm_topk_prob,
        "n_group": moe.num_groups,
        "topk_group": moe.top_groups,
    }


def _forget_shared_memory(token: str) -> None:
    """Takes the names of vLLM's shared memory away now that all ranks have it open, so that none is left by a crash."""
    if runtime.on_cpu:
        for file in SHARED_MEMORY.glob(f"*{token}*"):
            file.unlink(missing_ok=True)


def uses_expert_parallel(config: RolloutConfig, mesh: Mesh, spec: ModelSpec) -> bool:
    """Whether vLLM's ranks hold whole experts: as configured, else on GPUs where training spreads them too."""
    if config.enable_expert_parallel is not None:
        return config.enable_expert_parallel
    return not runtime.on_cpu and mesh.ep > 1 and spec.shape.moe is not None
