"""The frozen reference policy, and its absence."""

from __future__ import annotations

from collections.abc import Sequence

from megappo.engines.training import ModelEngine, PerToken
from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import MicroBatch, micro_batches
from megappo.workers.policy import LogProbs


class ReferenceWorker:
    """Fills `ref_log_probs` from a model that is never updated; and `ref_kl`, the exact KL of `policy` to it, where a
    policy is given."""

    def __init__(
        self, engine: ModelEngine, log_probs: LogProbs, micro_batch_size: int, policy: ModelEngine | None = None
    ) -> None:
        self.engine = engine
        self._log_probs = log_probs
        self._micro_batch_size = micro_batch_size
        self._policy = policy

    def fill_log_probs(self, batch: ExperienceBatch) -> ExperienceBatch:
        mesh = self.engine.mesh
        micros = micro_batches(batch, self._micro_batch_size, alignment=mesh.sequence_alignment, device=mesh.device)
        batch = batch.fill(ref_log_probs=self.engine.per_token(micros, self._log_probs))
        return batch if self._policy is None else batch.fill(ref_kl=self._policy.per_token(micros, self.kl_to(micros)))

    def kl_to(self, micros: Sequence[MicroBatch]) -> PerToken:
        """From the logits [b, s, vocab / tp] of another model on one of `micros` to its exact KL to the reference,
        [b, s]. All ranks of the model-parallel group call it, before that model runs."""
        ref_logits = self.engine.logits_of(micros)
        return lambda logits, micro: self._log_probs.exact_kl(logits, ref_logits(micro), micro)


class NoReference:
    """Stands where no KL term is configured: builds nothing, fills nothing."""

    def fill_log_probs(self, batch: ExperienceBatch) -> ExperienceBatch:
        return batch
