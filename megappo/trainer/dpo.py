"""Direct preference optimisation on the same engine: the task of `offline.py` on preference pairs.

The policy that it leaves, and the one that it started from, give a dense reward to PPO, `β · (log π_dpo − log π_ref)`
of each response token. Such a reward enters a step as `ExperienceBatch.token_scores` [tokens] float32, 0 outside of the
responses; `trainer/advantages.py` adds it to the token rewards that come from the sequence's score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megappo.algorithms.preferences import PairLoss, dpo_loss
from megappo.config.preferences import DPOConfig
from megappo.data.preferences import PreferencePair
from megappo.engines.training import LossTerm, ModelEngine, UpdateReport
from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import MicroBatch
from megappo.trainer.loop import Step
from megappo.workers.cutting import Cutter
from megappo.workers.pairs import chosen_and_rejected, pair_means, sequence_sums, summed
from megappo.workers.policy import LogProbs
from megappo.workers.reference import ReferenceWorker


@dataclass(frozen=True)
class DPOTask:
    """Learns from pairs, against the frozen starting policy. `num_pairs` are those of one step over all ranks."""

    config: DPOConfig
    pairs: Sequence[PreferencePair]
    log_probs: LogProbs
    reference: ReferenceWorker
    num_pairs: int
    sequences_per_row: int = 2

    def batch(self, rows: Sequence[int], step: Step) -> ExperienceBatch:
        with step.phase("ref_log_probs"):
            return self.reference.fill_log_probs(pairs_batch([self.pairs[row] for row in rows]))

    def loss(self, batch: ExperienceBatch) -> DPOLoss:
        return DPOLoss(self.config, self.log_probs, self.num_pairs)

    def metrics(self, report: UpdateReport) -> dict[str, float]:
        return report.metrics | {"dpo/grad_norm": report.grad_norm, "dpo/lr": report.learning_rate}


class DPOLoss:
    """The mean of the pairs' losses, and what their responses are worth as implicit rewards."""

    metrics = (
        "dpo/loss", "dpo/accuracy", "dpo/margin", "dpo/chosen_reward", "dpo/rejected_reward",
        "dpo/chosen_log_prob", "dpo/rejected_log_prob",
    )  # fmt: skip

    def __init__(self, config: DPOConfig, log_probs: LogProbs, num_pairs: int) -> None:
        self._config = config
        self._log_probs = log_probs
        self._num_pairs = num_pairs

    def __call__(self, output: Tensor, micro: MicroBatch) -> LossTerm:
        """`output` [b, s, vocab / tp] logits."""
        chosen, rejected = chosen_and_rejected(sequence_sums(micro, self._log_probs(output, micro)))
        references = chosen_and_rejected(sequence_sums(micro, micro.view("ref_log_probs")))
        loss = dpo_loss(
            chosen,
            rejected,
            *references,
            beta=self._config.beta,
            loss_type=self._config.loss_type,
            label_smoothing=self._config.label_smoothing,
        )
        return pair_means(loss, self._num_pairs, chosen, rejected)


def pairs_batch(pairs: Sequence[PreferencePair]) -> ExperienceBatch:
    """Pairs as a batch of 2 · pairs sequences, chosen and rejected in turn, whose responses are in the mask."""
    return ExperienceBatch.from_sequences(
        [(*pair.prompt.token_ids, *ids) for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids)],
        [len(pair.prompt.token_ids) for pair in pairs for _ in range(2)],
        range(2 * len(pairs)),
    )


@dataclass(frozen=True)
class DPOMeasure:
    """The loss of held-out pairs, without gradients. A collective call over the model's ranks."""

    task: DPOTask
    policy: ModelEngine
    micro_batch_size: int

    def __call__(self, pairs: Sequence[PreferencePair]) -> PairLoss:
        batch = self.task.reference.fill_log_probs(pairs_batch(pairs))
        chosen, rejected = self._sums(
            batch, log_probs_of(batch, self.policy, self.task.log_probs, self.micro_batch_size)
        )
        config = self.task.config
        return dpo_loss(
            chosen,
            rejected,
            *self._sums(batch, batch.get("ref_log_probs")),
            beta=config.beta,
            loss_type=config.loss_type,
            label_smoothing=config.label_smoothing,
        )

    @staticmethod
    def _sums(batch: ExperienceBatch, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        return chosen_and_rejected(summed(batch, log_probs))


def log_probs_of(batch: ExperienceBatch, policy: ModelEngine, log_probs: LogProbs, micro_batch_size: int) -> Tensor:
    """[tokens] float32 log-probs of a batch's response tokens, 0 elsewhere. A collective call over the model's ranks.

    DPO's implicit reward of a token is `β · (these − ref_log_probs)`, that of a response the sum over its tokens.
    """
    mesh = policy.mesh
    micros = Cutter(mesh, micro_batch_size)(batch).micros
    return policy.per_token(micros, log_probs)
