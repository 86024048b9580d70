"""The frozen reference policy, and its absence."""

from __future__ import annotations

from megappo.engines.training import ModelEngine
from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import micro_batches
from megappo.workers.policy import LogProbs


class ReferenceWorker:
    """Fills `ref_log_probs` from a model that is never updated."""

    def __init__(self, engine: ModelEngine, log_probs: LogProbs, micro_batch_size: int) -> None:
        self.engine = engine
        self._log_probs = log_probs
        self._micro_batch_size = micro_batch_size

    def fill_log_probs(self, batch: ExperienceBatch) -> ExperienceBatch:
        mesh = self.engine.mesh
        micros = micro_batches(batch, self._micro_batch_size, alignment=mesh.sequence_alignment, device=mesh.device)
        return batch.fill(ref_log_probs=self.engine.per_token(micros, self._log_probs))


class NoReference:
    """Stands where no KL term is configured: builds nothing, fills nothing."""

    def fill_log_probs(self, batch: ExperienceBatch) -> ExperienceBatch:
        return batch
