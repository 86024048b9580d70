"""The frozen reference policy, and its absence."""

from __future__ import annotations

from torch import Tensor

from megappo.engines.training import ModelEngine
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
        return batch if self._policy is None else batch.fill(ref_kl=self._policy.per_token(micros, self.exact_kl))

    def exact_kl(self, logits: Tensor, micro: MicroBatch) -> Tensor:
        """KL of the model with these `logits` [b, s, vocab / tp] to the reference, which runs on the micro-batch here:
        [b, s]."""
        return self._log_probs.exact_kl(logits, self.engine.logits(micro), micro)


class NoReference:
    """Stands where no KL term is configured: builds nothing, fills nothing."""

    def fill_log_probs(self, batch: ExperienceBatch) -> ExperienceBatch:
        return batch
