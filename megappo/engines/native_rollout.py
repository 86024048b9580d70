"""The native rollout engine: decodes with a key-value cache on the live training shards. Its parts are in `native/`.

It needs no second copy of the weights and nothing but Megatron and torch. Batching is continuous: prompts are computed
once for all their responses, finished sequences leave at once, and waiting ones take their slots.
"""

import time
from collections.abc import Callable, Sequence

from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt import GPTModel
from torch import nn

from megappo.engines.native.attention import CurrentStep
from megappo.engines.native.cache import CacheShape, KVCache
from megappo.engines.native.check import check_model, check_requests
from megappo.engines.native.schedule import GeneratedSequence, Schedule, Step
from megappo.engines.native.stages import draw_on_all_ranks, local_logits
from megappo.engines.native.stopping import StopRule
from megappo.engines.native.swaps import decoding
from megappo.engines.native.tokens import step_tokens
from megappo.engines.rollout import Completion, GenerationRequest, Progress, SamplingParams, SyncReport
from megappo.models.families.base import ModelShape
from megappo.parallel.mesh import Mesh


class NativeRolloutEngine:
    """`RolloutEngine` on this rank's stage and shard of a GPTModel, which may stand in Megatron's wrappers (DDP).

    `decode` turns token ids into text without special tokens; `eos_ids` end a response. `max_num_seqs` sequences are
    decoded at once at most, and `max_num_batched_tokens` (padded) prompt tokens computed in one forward. Raises
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
    ) -> None:
        self._wrapped = model
        self._model = _unwrapped(model)
        self._shape = shape
        self._mesh = mesh
        self._decode = decode
        self._eos_ids = tuple(eos_ids)
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        check_model(self._model.config)

    def sync_weights(self) -> SyncReport:
        """Waits until the training weights are whole; then there is nothing to do: the engine decodes on them.

        With an overlapped parameter gather the optimizer leaves them stale until the next forward, so the gather is
        forced: all data-parallel ranks must call this together.
        """
        start = time.perf_counter()
        if isinstance(self._wrapped, DistributedDataParallel) and self._wrapped.ddp_config.overlap_param_gather:
            self._wrapped.start_param_sync(force_sync=True)
        parameters = sum(parameter.nbytes for parameter in self._model.parameters())
        return SyncReport(bytes_aliased=parameters, bytes_copied=0, bytes_sent=0, seconds=time.perf_counter() - start)

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[Completion]:
        """Completions in the order of `requests`, the same on every rank of the model-parallel group.

        Data-parallel ranks may call it with different requests, and a different number of times. Raises DataError or
        ConfigError, before anything runs, for requests that can't be answered.
        """
        check_requests(requests, sampling, self._shape.vocab_size, self._shape.max_positions)
        if not requests:
            return []
        rule = StopRule(sampling, self._eos_ids, self._decode)
        schedule = Schedule(requests, self._max_num_seqs, self._max_num_batched_tokens)
        max_length = max(len(request.prompt_ids) for request in requests) + sampling.max_tokens
        cache, current = self._cache(len(requests), max_length), CurrentStep()
        completions: dict[int, Completion] = {}
        with decoding(self._model, cache, max_length, current):
            while not schedule.is_finished:
                step = schedule.next_step()
                cache.reserve(step.longest)
                current.tokens = step_tokens(step, self._mesh.sequence_alignment, self._mesh.device)
                self._draw(step, current, sampling)
                cache.copy(step.forks)
                finished = self._finished(step, rule)
                cache.copy(schedule.retire(finished))
                completions |= {sequence.index: completion for sequence, completion in finished.items()}
                if finished and progress is not None:
                    progress(len(completions), len(requests))
        return [completions[index] for index in range(len(requests))]

    def _draw(self, step: Step, current: CurrentStep, sampling: SamplingParams) -> None:
        """Computes `step` and appends the token that each of its sequences draws, with its log-prob."""
        logits = local_logits(self._model, self._mesh, current.tokens)
        drawn = draw_on_all_ranks(logits, step.drawing, sampling, self._shape.vocab_size, self._mesh)
        if not drawn.log_probs.isfinite().all():
            row = int(drawn.log_probs.isfinite().logical_not().nonzero()[0, 0])
            raise FloatingPointError(
                f"the model's logits for request {step.drawing[row].index} are not finite: its weights are broken"
            )
        for sequence, token_id, log_prob in zip(
            step.drawing, drawn.token_ids.tolist(), drawn.log_probs.tolist(), strict=True
        ):
            sequence.token_ids.append(token_id)
            sequence.log_probs.append(log_prob)

    def _finished(self, step: Step, rule: StopRule) -> dict[GeneratedSequence, Completion]:
        """The sequences that are complete with the token that they drew in `step`."""
        finished = {}
        for sequence in step.drawing:
            reason = rule.reason(sequence.token_ids)
            if reason is not None:
                text = self._decode(sequence.token_ids)
                finished[sequence] = Completion(tuple(sequence.token_ids), tuple(sequence.log_probs), text, reason)
        return finished

    def _cache(self, num_requests: int, max_length: int) -> KVCache:
        layers = self._model.decoder.layers
        attention = layers[0].self_attention
        shape = CacheShape(
            num_layers=len(layers),
            num_slots=min(self._max_num_seqs, num_requests),
            num_kv_heads=attention.num_query_groups_per_partition,
            head_dim=attention.hidden_size_per_attention_head,
            max_length=max_length,
        )
        return KVCache(shape, self._model.config.params_dtype, self._mesh.device)


def _unwrapped(model: nn.Module) -> GPTModel:
    """The GPTModel inside Megatron's wrappers, each of which holds the next as `module`."""
    while not isinstance(model, GPTModel):
        inner = getattr(model, "module", None)
        assert isinstance(inner, nn.Module), f"the rollout engine was given a {type(model).__name__}, not a GPTModel"
        model = inner
    return model
