"""The vLLM rollout engine: vLLM in the ranks of training, which it takes turns with. Its parts are in `vllm/`.

A replica is one vLLM engine a rank of it, all given the same requests (vLLM's external launcher).
"""

import megappo.parallel.runtime  # noqa: F401  # isort: skip  before megatron

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from megappo.config.grid import GenerationGrid
from megappo.config.rollout import RolloutConfig
from megappo.engines.hybrid.execute import Moved
from megappo.engines.native_rollout import finish_parameter_gather
from megappo.engines.requests import check_requests
from megappo.engines.rollout import (
    Completion,
    GenerationRequest,
    Progress,
    Replicas,
    SamplingParams,
    SyncReport,
    WorstTensor,
)
from megappo.engines.vllm.direct import DirectTransfer
from megappo.engines.vllm.environment import process_state_kept
from megappo.engines.vllm.experts import ExpertStore
from megappo.engines.vllm.generation import check_sampling, generate
from megappo.engines.vllm.memory import EngineMemory, require_share, synchronize, used_bytes
from megappo.engines.vllm.patches import default_group_kept
from megappo.engines.vllm.start import check_engine, check_experts, start_engine, uses_expert_parallel
from megappo.engines.vllm.transfer import LoadTransfer, WeightTransfer, chosen_way
from megappo.models.architecture import ModelSpec
from megappo.models.chunks import unwrapped
from megappo.models.routing import moe_layers
from megappo.observe.memory import AbsentBytes
from megappo.parallel.mesh import Mesh

_log = logging.getLogger(__name__)
DEFAULT_BUCKET_BYTES = 256 << 20


class VLLMRolloutEngine:
    """`RolloutEngine` on vLLM, beside this rank's stage and shard of a GPTModel, in Megatron's wrappers or not.

    `decode` turns token ids into text without special tokens; `eos_ids` end a response. `max_model_len` is the longest
    sequence where the configuration has none. With `records_experts` completions of a model with experts have
    `routed_experts`. All ranks of the world make it together, one engine a process at a time.
    Raises ConfigError where vLLM is missing or can't do what is asked.
    """

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec,
        mesh: Mesh,
        config: RolloutConfig,
        *,
        dtype: torch.dtype,
        decode: Callable[[Sequence[int]], str],
        eos_ids: Sequence[int],
        tokenizer_folder: str | Path,
        max_model_len: int,
        weights: Literal["auto", "direct", "load"],
        seed: int,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        records_experts: bool = False,
    ) -> None:
        self._grid = GenerationGrid(mesh.training_grid, config.tensor_model_parallel_size or mesh.tp)
        self._max_model_len = config.max_model_len or max_model_len
        check_engine(config, spec, self._max_model_len)
        check_experts(config, mesh, spec, self._grid.tp)
        self._wrapped = model
        self._vocab_size = spec.shape.vocab_size
        self._decode = decode
        self._eos_ids = tuple(eos_ids)
        self._has_tokenizer = bool(config.stop) or config.multi_turn.enable
        self._seed_per_request = config.seed_per_request
        self._transfer = self._chosen_transfer(config, spec, mesh, weights, bucket_bytes)
        moe = spec.shape.moe if records_experts else None
        self._experts = None if moe is None else ExpertStore(moe_layers(moe, spec.shape.num_layers), moe)
        _log.info("weights go to vLLM %s", self._transfer.description)
        torch.cuda.empty_cache()  # vLLM does so when it starts: what that frees is not the engine's
        require_share(config.gpu_memory_utilization, mesh)
        used_before_start = used_bytes()
        recording = nullcontext() if self._experts is None else self._experts.starting()
        with process_state_kept(), self._transfer.starting(), recording:
            self._llm: Any = start_engine(
                config,
                spec,
                mesh,
                self._grid,
                self._transfer.load,
                dtype=dtype,
                tokenizer_folder=tokenizer_folder,
                max_model_len=self._max_model_len,
                seed=seed,
            )
            self._memory = EngineMemory(
                self._llm,
                mesh,
                share=config.gpu_memory_utilization,
                sleeps=config.free_cache_engine,
                level=self._transfer.sleep_level,
                used_before_start=used_before_start,
            )
        if self._experts is not None:
            self._experts.follow(self._llm.llm_engine)
        self._has_turn = False
        self._release_seconds = 0.0
        self.when_copied: Callable[[], None] = lambda: None

    def _chosen_transfer(
        self,
        config: RolloutConfig,
        spec: ModelSpec,
        mesh: Mesh,
        weights: Literal["auto", "direct", "load"],
        bucket_bytes: int,
    ) -> WeightTransfer:
        stage, expert_parallel = unwrapped(self._wrapped), uses_expert_parallel(config, mesh, spec)
        if chosen_way(weights, config.quantization) == "load":
            return LoadTransfer(
                stage, spec, mesh, self._grid, expert_parallel=expert_parallel, quantization=config.quantization
            )
        return DirectTransfer(stage, spec, mesh, self._grid, expert_parallel=expert_parallel, bucket_bytes=bucket_bytes)

    @property
    def replicas(self) -> Replicas:
        """Groups of ranks strided over the training layout, as `GenerationGrid` says."""
        return Replicas(self._grid.groups)

    @property
    def absent(self) -> AbsentBytes:
        """What it has given back of what torch counts as allocated."""
        return self._memory.absent

    def sync_weights(self) -> SyncReport:
        """Wakes the engine and makes the training weights of this moment its own; every rank of the world calls it.

        The cache comes last, so that it is not there while a transfer takes memory, nor training's weights where
        `when_copied` moves them away. With an overlapped parameter gather the optimizer leaves weights stale until the
        next forward: it is forced. Raises ConfigError on all ranks where a GPU has no room for the cache.
        """
        start = time.perf_counter()
        finish_parameter_gather(self._wrapped)
        with process_state_kept():
            self._memory.wake_weights()
            moved, transfer_seconds = self._moved()
            if self._transfer.copies_all:
                with self._memory.of_others():
                    self.when_copied()
            self._memory.wake_cache()
            self._empty_cache()
        self._has_turn = True
        return SyncReport(
            bytes_aliased=moved.aliased,
            bytes_copied=moved.copied,
            bytes_sent=moved.sent,
            seconds=time.perf_counter() - start,
            transfer_seconds=transfer_seconds,
            release_seconds=self._release_seconds,
            bytes_received=moved.received,
            peak_bytes=moved.peak_bytes,
            extra_bytes=moved.extra_bytes,
            held=self._memory.held,
        )

    def _empty_cache(self) -> None:
        was_reset = self._llm.reset_prefix_cache()
        assert was_reset, "vLLM still computes something, and its cache can't be emptied"
        if self._experts is not None:
            self._experts.clear()

    @contextmanager
    def memory_lent(self) -> Iterator[None]:
        """While inside, between `sync_weights` and `release`, training has the memory of the cache, and nothing can be
        generated; afterwards the engine goes on with its weights and an empty cache. A collective call."""
        assert self._has_turn, "memory is lent by an engine that has none; call sync_weights first"
        self._has_turn = False
        with process_state_kept():
            is_lent = self._memory.lend()
        yield
        if is_lent:
            with process_state_kept():
                self._memory.take_back()
                self._empty_cache()
        self._has_turn = True

    def _moved(self) -> tuple[Moved, float]:
        """What the transfer moved, and the seconds that it took on the device."""
        synchronize()
        start = time.perf_counter()
        (moved,) = self._llm.collective_rpc(lambda worker: self._transfer.transfer(worker.get_model(), worker))
        synchronize()
        return moved, time.perf_counter() - start

    def worst_tensor(self) -> WorstTensor | None:
        """vLLM's parameter that is farthest from the training shards, or why none can be named; None where all are
        equal. Every rank of the world calls it, between `sync_weights` and `release`."""
        return self._transfer.worst_tensor()

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[Completion]:
        """Completions in the order of `requests`, the same on every rank of the replica; between `sync_weights` and
        `release` only, for vLLM hangs when it is asked in its sleep.

        Replicas may be given different requests. Raises DataError or ConfigError, before anything runs, for requests
        that can't be answered.
        """
        assert self._has_turn, "generate was called while training has its turn; call sync_weights first"
        check_requests(requests, sampling, self._vocab_size, self._max_model_len)
        check_sampling(sampling, self._has_tokenizer)
        with process_state_kept():
            return generate(
                self._llm.llm_engine,
                requests,
                sampling,
                self._eos_ids,
                self._decode,
                progress,
                seed_per_request=self._seed_per_request,
                experts=self._experts,
            )

    def release(self) -> None:
        """Puts the engine to sleep, which frees its cache, and its weights where they are not training's."""
        self._has_turn = False
        start = time.perf_counter()
        with process_state_kept():
            self._memory.sleep()
        self._release_seconds = time.perf_counter() - start

    def close(self) -> None:
        """Ends vLLM with its process groups; torch's default group and Megatron's groups stay."""
        self._has_turn = False
        with process_state_kept(), default_group_kept():
            self._llm.llm_engine.engine_core.shutdown()
