"""The native rollout engine: decodes with a key-value cache on the live training shards. Its parts are in `native/`.

It needs no second copy of the weights and nothing but Megatron and torch. Batching is continuous: prompts are computed
once for all their responses, finished sequences leave at once, and waiting ones take their slots.
"""

import time
from collections.abc import Callable, Sequence

from torch import nn

from megappo.engines.native.check import check_model
from megappo.engines.native.loop import DecodingLoop
from megappo.engines.native.ranks import DecodingRanks
from megappo.engines.optimizer import WrappedChunks
from megappo.engines.overlap import finish_gather
from megappo.engines.rollout import Completion, GenerationRequest, Progress, Replicas, SamplingParams, SyncReport
from megappo.models.chunks import unwrapped
from megappo.models.families.base import ModelShape
from megappo.parallel.mesh import Mesh


class NativeRolloutEngine:
    """`RolloutEngine` on this rank's stage and shard of a GPTModel, which may stand in Megatron's wrappers (DDP).

    `decode` turns token ids into text without special tokens; `eos_ids` end a response. `max_num_seqs` sequences are
    decoded at once at most, and `max_num_batched_tokens` (padded) prompt tokens computed in one forward. They are cut
    into `pipeline_micro_batches` groups that follow each other through the stages, None: as many as stages. Raises
    ConfigError for a model or layout that it does not decode.
    """

    def __init__(
        self,
        model: nn.Module,
        shape: ModelShape,
        mesh: Mesh,
        *,
        decode: Callable[[Sequence[int]], str],
        eos_ids: Sequence[int],
        max_num_seqs: int,
        max_num_batched_tokens: int,
        records_experts: bool = False,
        pipeline_micro_batches: int | None = None,
    ) -> None:
        self._wrapped = model
        self._model = unwrapped(model)
        check_model(self._model.config)
        self._loop = DecodingLoop(
            self._model,
            shape,
            DecodingRanks.of_mesh(mesh),
            decode,
            tuple(eos_ids),
            max_num_seqs,
            max_num_batched_tokens,
            records_experts,
            pipeline_micro_batches or mesh.pp,
        )
        copies = mesh.grid.flatten(1, 2).unbind(1)
        self._replicas = Replicas(tuple(tuple(copy.flatten().tolist()) for copy in copies))

    @property
    def replicas(self) -> Replicas:
        """One for each data-parallel and context-parallel rank: all shards of its copy of the model."""
        return self._replicas

    def sync_weights(self) -> SyncReport:
        """Waits until the training weights are whole; then there is nothing to do: the engine decodes on them.

        With an overlapped parameter gather the optimizer leaves them stale until the next forward, so the gather is
        forced: all data-parallel ranks must call this together.
        """
        start = time.perf_counter()
        finish_parameter_gather(self._wrapped)
        parameters = sum(parameter.nbytes for parameter in self._model.parameters())
        return SyncReport(bytes_aliased=parameters, bytes_copied=0, bytes_sent=0, seconds=time.perf_counter() - start)

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[Completion]:
        """Completions in the order of `requests`, the same on every rank of the model-parallel group.

        Data-parallel ranks may call it with different requests, and a different number of times. Raises DataError or
        ConfigError, before anything runs, for requests that can't be answered.
        """
        return self._loop.generate(requests, sampling, progress)

    def release(self) -> None:
        """Frees nothing: the weights are training's, and the cache lives as long as one `generate`."""

    def close(self) -> None:
        """Ends nothing, for the same reasons."""


def finish_parameter_gather(model: nn.Module) -> None:
    """Makes the parameters whole where the optimizer left their gather to the next forward (overlapped gather)."""
    finish_gather(model.chunks if isinstance(model, WrappedChunks) else [model])
