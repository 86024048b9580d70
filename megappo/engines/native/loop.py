"""The decoding loop: continuous batching with a key-value cache, on any GPTModel and the ranks that hold it.

Where its weights come from, and when it may run, is for the engines to say.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megappo.engines.native.attention import CurrentStep
from megappo.engines.native.cache import CacheShape, KVCache
from megappo.engines.native.ranks import DecodingRanks
from megappo.engines.native.record import ExpertRecorder
from megappo.engines.native.schedule import GeneratedSequence, Schedule, Step
from megappo.engines.native.stages import draw_on_all_ranks, local_logits
from megappo.engines.native.stopping import StopRule
from megappo.engines.native.swaps import decoding
from megappo.engines.native.tokens import step_tokens
from megappo.engines.requests import check_requests
from megappo.engines.rollout import Completion, GenerationRequest, Progress, SamplingParams
from megappo.models.chunks import StageModel, chunks_of
from megappo.models.families.base import ModelShape


@dataclass(frozen=True)
class DecodingLoop:
    """Generates with `model`, this rank's shard of a stage.

    `decode` turns token ids into text without special tokens; `eos_ids` end a response. `max_num_seqs` sequences are
    decoded at once at most, and `max_num_batched_tokens` (padded) prompt tokens computed in one forward. With
    `records_experts` completions have `routed_experts`.
    """

    model: StageModel
    shape: ModelShape
    ranks: DecodingRanks
    decode: Callable[[Sequence[int]], str]
    eos_ids: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    records_experts: bool = False

    def generate(
        self, requests: Sequence[GenerationRequest], sampling: SamplingParams, progress: Progress | None = None
    ) -> list[Completion]:
        """Completions in the order of `requests`, the same on every rank of the model copy.

        Copies may call it with different requests, and a different number of times. Raises DataError or ConfigError,
        before anything runs, for requests that can't be answered.
        """
        check_requests(requests, sampling, self.shape.vocab_size, self.shape.max_positions)
        if not requests:
            return []
        rule = StopRule(sampling, self.eos_ids, self.decode)
        schedule = Schedule(requests, self.max_num_seqs, self.max_num_batched_tokens)
        max_length = max(len(one.prompt_ids) + (one.max_tokens or sampling.max_tokens) for one in requests)
        cache, current = self._cache(len(requests), max_length), CurrentStep()
        completions: dict[int, Completion] = {}
        recorder = self._recorder()
        with decoding(self.model, cache, max_length, current), _recording(self.model, recorder):
            while not schedule.is_finished:
                step = schedule.next_step()
                cache.reserve(step.longest)
                current.tokens = step_tokens(step, self.ranks.sequence_alignment, self.ranks.device)
                self._draw(step, current, sampling, recorder)
                cache.copy(step.forks)
                finished = self._finished(step, rule)
                cache.copy(schedule.retire(finished))
                completions |= {sequence.index: completion for sequence, completion in finished.items()}
                for sequence, completion in finished.items():
                    requests[sequence.index].tell(completion)
                if finished and progress is not None:
                    progress(len(completions), len(requests))
        if recorder is not None:
            completions = recorder.completed(completions)
        return [completions[index] for index in range(len(requests))]

    def _recorder(self) -> ExpertRecorder | None:
        if not self.records_experts:
            return None
        return ExpertRecorder(self.model.expert_routing, self.ranks)

    def _draw(
        self, step: Step, current: CurrentStep, sampling: SamplingParams, recorder: ExpertRecorder | None
    ) -> None:
        """Computes `step` and appends the token that each of its sequences draws, with its log-prob."""
        logits = local_logits(self.model, self.ranks, current.tokens)
        if recorder is not None:
            recorder.end_step(step, len(current.tokens.token_ids))
        drawn = draw_on_all_ranks(logits, step.drawing, sampling, self.shape.vocab_size, self.ranks)
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
            reason = rule.reason(sequence.token_ids, sequence.max_tokens)
            if reason is not None:
                text = self.decode(sequence.token_ids)
                finished[sequence] = Completion(tuple(sequence.token_ids), tuple(sequence.log_probs), text, reason)
        return finished

    def _cache(self, num_requests: int, max_length: int) -> KVCache:
        layers = [layer for chunk in chunks_of(self.model) for layer in chunk.decoder.layers]
        attention, latent = layers[0].self_attention, self.shape.latent
        shape = CacheShape(
            num_layers=len(layers),
            num_slots=min(self.max_num_seqs, num_requests),
            num_kv_heads=attention.num_query_groups_per_partition,
            head_dim=attention.hidden_size_per_attention_head if latent is None else self.shape.head_dim,
            max_length=max_length,
            value_head_dim=None if latent is None else latent.value_head_dim,
        )
        return KVCache(shape, self.model.config.params_dtype, self.ranks.device)


@contextmanager
def _recording(model: StageModel, recorder: ExpertRecorder | None) -> Iterator[None]:
    """While inside, the routers of a model with experts belong to generation: training's micro-batch is left alone."""
    routing = getattr(model, "expert_routing", None)
    if routing is None:
        yield
        return
    routing.reset()
    routing.recorder = recorder
    try:
        yield
    finally:
        routing.recorder = None
