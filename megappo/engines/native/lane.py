"""A lane: one of the groups of sequences that follow each other through the pipeline stages, each at its own step."""

from collections.abc import Sequence

from megappo.engines.native.cache import KVCache
from megappo.engines.native.ranks import DecodingRanks
from megappo.engines.native.record import ExpertRecorder
from megappo.engines.native.schedule import GeneratedSequence, Schedule, Step
from megappo.engines.native.stages import PendingDraw
from megappo.engines.native.tokens import StepTokens, step_tokens


class Lane:
    """Its schedule, its cache, the step that it is at, and the tokens of that step on their way."""

    def __init__(self, schedule: Schedule, cache: KVCache, recorder: ExpertRecorder | None) -> None:
        self.schedule = schedule
        self.cache = cache
        self.recorder = recorder
        self.pending: PendingDraw | None = None
        self._step: Step | None = None
        self._tokens: StepTokens | None = None

    @property
    def step(self) -> Step:
        assert self._step is not None, "a lane is asked for its step before it has one"
        return self._step

    @property
    def tokens(self) -> StepTokens:
        assert self._tokens is not None, "a lane is asked for its tokens before it has a step"
        return self._tokens

    def begin(self, ranks: DecodingRanks) -> None:
        """Plans the next step, and makes room for it."""
        self._step = self.schedule.next_step()
        self.cache.reserve(self._step.longest)
        self._tokens = step_tokens(self._step, ranks.sequence_alignment, ranks.device)

    def take(self) -> Sequence[GeneratedSequence]:
        """Waits for the tokens of the step under way and appends them with their log-probs; the sequences that drew
        one, none before the first step. Raises FloatingPointError for logits that are not finite."""
        if self.pending is None:
            return ()
        drawn, sequences = self.pending.result(), self.step.drawing
        self.pending = None
        if not drawn.log_probs.isfinite().all():
            row = int(drawn.log_probs.isfinite().logical_not().nonzero()[0, 0])
            raise FloatingPointError(
                f"the model's logits for request {sequences[row].index} are not finite: its weights are broken"
            )
        for sequence, token_id, log_prob in zip(
            sequences, drawn.token_ids.tolist(), drawn.log_probs.tolist(), strict=True
        ):
            sequence.token_ids.append(token_id)
            sequence.log_probs.append(log_prob)
        self.cache.copy(self.step.forks)
        return sequences
