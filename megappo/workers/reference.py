"""The frozen reference policy, and its absence."""

from __future__ import annotations

from collections.abc import Sequence

from megappo.engines.training import ModelEngine, PerToken
from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import MicroBatch
from megappo.workers.cutting import Cutter
from megappo.workers.policy import LogProbs


class ReferenceWorker:
    """Fills `ref_log_probs` from a model that is never updated; and `ref_kl`, the exact KL of `policy` to it, where a
    policy is given."""

    def __init__(
        self, engine: ModelEngine, log_probs: LogProbs, cut: Cutter, policy: ModelEngine | None = None
    ) -> None:
        self.engine = engine
        self._log_probs = log_probs
        self._cut = cut
        self._policy = policy

    def fill_log_probs(self, batch: ExperienceBatch) -> ExperienceBatch:
        """Fills `ref_log_probs`, and `ref_kl` where the KL in the reward is exact."""
        cut = self._cut(batch)
        batch = batch.fill(ref_log_probs=cut.restored(self.engine.per_token(cut.micros, self._log_probs)))
        if self._policy is None:
            return batch
        return batch.fill(ref_kl=cut.restored(self._policy.per_token(cut.micros, self.kl_to(cut.micros))))

    def kl_to(self, micros: Sequence[MicroBatch]) -> PerToken:
        """From the logits [b, s, vocab / tp] of another model on one of `micros` to its exact KL to the reference,
        [b, s]. All ranks of the model-parallel group call it, before that model runs."""
        ref_logits = self.engine.logits_of(micros)
        return lambda logits, micro: self._log_probs.exact_kl(logits, ref_logits(micro), micro)


class NoReference:
    """Stands where no KL term is configured: builds nothing, fills nothing."""

    def fill_log_probs(self, batch: ExperienceBatch) -> ExperienceBatch:
        return batch
