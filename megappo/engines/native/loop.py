"""The decoding loop: continuous batching with a key-value cache, on any GPTModel and the ranks that hold it.

Over pipeline stages, groups of sequences (lanes) follow each other: while a stage computes one, the stage before it
computes the next. Where the weights come from, and when the loop may run, is for the engines to say.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from megappo.engines.native.attention import CurrentStep
from megappo.engines.native.cache import CacheShape, KVCache
from megappo.engines.native.lane import Lane
from megappo.engines.native.ranks import DecodingRanks
from megappo.engines.native.record import ExpertRecorder
from megappo.engines.native.schedule import GeneratedSequence, Schedule
from megappo.engines.native.stages import Pipeline, draw_on_all_ranks
from megappo.engines.native.stopping import StopRule
from megappo.engines.native.swaps import decoding
from megappo.engines.requests import check_requests
from megappo.engines.rollout import Completion, GenerationRequest, Progress, SamplingParams
from megappo.models.chunks import StageModel, chunks_of
from megappo.models.families.base import ModelShape


@dataclass(frozen=True)
class DecodingLoop:
    """Generates with `model`, this rank's shard of a stage.

    `decode` turns token ids into text without special tokens; `eos_ids` end a response. `max_num_seqs` sequences are
    decoded at once at most, and `max_num_batched_tokens` (padded) prompt tokens computed in one forward. With
    `records_experts` completions have `routed_experts`. The sequences are cut into `num_lanes` groups, fewer where
    there are not that many: as many as stages keep all of these busy.
    """

    model: StageModel
    shape: ModelShape
    ranks: DecodingRanks
    decode: Callable[[Sequence[int]], str]
    eos_ids: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    records_experts: bool = False
    num_lanes: int = 1

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
        answers = _Answers(requests, StopRule(sampling, self.eos_ids, self.decode), self.decode, progress)
        max_length = max(len(one.prompt_ids) + (one.max_tokens or sampling.max_tokens) for one in requests)
        schedules = Schedule.several(requests, self.num_lanes, self.max_num_seqs, self.max_num_batched_tokens)
        lanes = [Lane(schedule, self._cache(schedule, max_length), self._recorder()) for schedule in schedules]
        current = CurrentStep()
        with decoding(self.model, max_length, current), _routers_generate(self.model):
            self._decode(lanes, current, sampling, answers)
        completions = answers.completions
        for lane in lanes:
            if lane.recorder is not None:
                completions |= lane.recorder.completed(completions)
        return [completions[index] for index in range(len(requests))]

    def _decode(
        self, lanes: Sequence[Lane], current: CurrentStep, sampling: SamplingParams, answers: "_Answers"
    ) -> None:
        """All lanes to their ends, in rounds: each makes a step in each, one virtual stage of all lanes after another.

        Every rank goes through lanes and stages in this order, so that all messages find each other.
        """
        chunks, running = chunks_of(self.model), list(lanes)
        pipeline = Pipeline(self.ranks, len(lanes) * len(chunks))
        try:
            while running:
                for lane in tuple(running):
                    answers.take(lane)
                    if lane.schedule.is_finished:
                        running.remove(lane)
                    else:
                        lane.begin(self.ranks)
                        self._run(lane, 0, pipeline, current, sampling)
                for stage in range(1, len(chunks)):
                    for lane in running:
                        self._run(lane, stage, pipeline, current, sampling)
        finally:
            pipeline.finish()

    def _run(self, lane: Lane, stage: int, pipeline: Pipeline, current: CurrentStep, sampling: SamplingParams) -> None:
        """One virtual stage of a lane's step; with the last, its tokens are on their way."""
        chunks, step, tokens = chunks_of(self.model), lane.step, lane.tokens
        current.enter(tokens, lane.cache)
        if lane.recorder is not None:
            self.model.expert_routing.recorder = lane.recorder
        logits = pipeline.run(chunks[stage], tokens)
        if stage < len(chunks) - 1:
            return
        if lane.recorder is not None:
            lane.recorder.end_step(step, len(tokens.token_ids))
        lane.pending = draw_on_all_ranks(
            logits, step.drawing, sampling, self.shape.vocab_size, self.ranks, in_background=self.num_lanes > 1
        )

    def _recorder(self) -> ExpertRecorder | None:
        if not self.records_experts:
            return None
        return ExpertRecorder(self.model.expert_routing, self.ranks)

    def _cache(self, schedule: Schedule, max_length: int) -> KVCache:
        layers = [layer for chunk in chunks_of(self.model) for layer in chunk.decoder.layers]
        attention, latent = layers[0].self_attention, self.shape.latent
        shape = CacheShape(
            num_layers=len(layers),
            num_slots=schedule.max_num_seqs,
            num_kv_heads=attention.num_query_groups_per_partition,
            head_dim=attention.hidden_size_per_attention_head if latent is None else self.shape.head_dim,
            max_length=max_length,
            value_head_dim=None if latent is None else latent.value_head_dim,
        )
        return KVCache(shape, self.model.config.params_dtype, self.ranks.device)


class _Answers:
    """The completions so far, by request, and who is told of them."""

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        rule: StopRule,
        decode: Callable[[Sequence[int]], str],
        progress: Progress | None,
    ) -> None:
        self.completions: dict[int, Completion] = {}
        self._requests = requests
        self._rule = rule
        self._decode = decode
        self._progress = progress

    def take(self, lane: Lane) -> None:
        """Ends the step that a lane has under way: its tokens, and the sequences that are complete with them."""
        finished = {}
        for sequence in lane.take():
            completion = self._completion(sequence)
            if completion is not None:
                finished[sequence] = completion
        lane.cache.copy(lane.schedule.retire(finished))
        self.completions |= {sequence.index: completion for sequence, completion in finished.items()}
        for sequence, completion in finished.items():
            self._requests[sequence.index].tell(completion)
        if finished and self._progress is not None:
            self._progress(len(self.completions), len(self._requests))

    def _completion(self, sequence: GeneratedSequence) -> Completion | None:
        reason = self._rule.reason(sequence.token_ids, sequence.max_tokens)
        if reason is None:
            return None
        text = self._decode(sequence.token_ids)
        return Completion(tuple(sequence.token_ids), tuple(sequence.log_probs), text, reason)


@contextmanager
def _routers_generate(model: StageModel) -> Iterator[None]:
    """While inside, the routers of a model with experts belong to generation: training's micro-batch is left alone."""
    routing = getattr(model, "expert_routing", None)
    if routing is None:
        yield
        return
    routing.reset()
    try:
        yield
    finally:
        routing.recorder = None
