"""Supervised fine-tuning on the same engine: the task of `offline.py` on prompt-response pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megappo.algorithms.aggregate import Denominators, aggregate
from megappo.data.prompts import SupervisedExample
from megappo.engines.training import LossTerm, UpdateReport
from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import MicroBatch
from megappo.parallel.mesh import Mesh
from megappo.trainer.loop import Step
from megappo.workers.policy import LogProbs, global_denominators


@dataclass(frozen=True)
class SupervisedTask:
    """Learns the responses of examples."""

    mesh: Mesh
    examples: Sequence[SupervisedExample]
    log_probs: LogProbs
    sequences_per_row: int = 1

    def batch(self, rows: Sequence[int], step: Step) -> ExperienceBatch:
        return supervised_batch([self.examples[row] for row in rows])

    def loss(self, batch: ExperienceBatch) -> SupervisedLoss:
        return SupervisedLoss(self.log_probs, global_denominators(batch, self.mesh))

    def metrics(self, report: UpdateReport) -> dict[str, float]:
        return report.metrics | {"sft/grad_norm": report.grad_norm, "sft/lr": report.learning_rate}


class SupervisedLoss:
    """Mean negative log-likelihood of the response tokens of the global batch, in nats."""

    metrics = ("sft/loss",)

    def __init__(self, log_probs: LogProbs, denominators: Denominators) -> None:
        self._log_probs = log_probs
        self._denominators = denominators

    def __call__(self, output: Tensor, micro: MicroBatch) -> LossTerm:
        log_probs = self._log_probs(output, micro)
        loss = aggregate(-log_probs, micro.response_mask, "token-mean", self._denominators)
        return LossTerm(loss, (loss,))


def supervised_batch(examples: Sequence[SupervisedExample]) -> ExperienceBatch:
    """Examples as a batch whose responses are the targets."""
    return ExperienceBatch.from_sequences(
        [example.token_ids for example in examples],
        [example.response_start for example in examples],
        range(len(examples)),
    )
