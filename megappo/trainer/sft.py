"""Supervised fine-tuning on the same engine: one optimizer step on prompt-response pairs is a step of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megappo.algorithms.aggregate import Denominators, aggregate
from megappo.data.iterate import PromptOrder
from megappo.data.prompts import SupervisedExample
from megappo.engines.training import LossTerm, TrainingEngine
from megappo.errors import ExitCode
from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import MicroBatch, micro_batches
from megappo.parallel.mesh import Mesh
from megappo.planner.batch import MiniBatchPlan
from megappo.trainer.experience_metrics import global_tokens
from megappo.trainer.loop import Loop
from megappo.workers.policy import LogProbs, global_denominators


@dataclass(frozen=True)
class SupervisedTrainer:
    """The supervised loop on the ranks of one training layout."""

    mesh: Mesh
    plan: MiniBatchPlan
    examples: Sequence[SupervisedExample]
    order: PromptOrder
    engine: TrainingEngine
    log_probs: LogProbs
    loop: Loop

    def fit(self) -> ExitCode:
        """Trains until the last step, or until a signal asks to stop."""
        share = self.plan.sequences_per_rank
        mine = slice(self.mesh.dp_rank * share, (self.mesh.dp_rank + 1) * share)
        for step in self.loop.steps():
            with step.phase("update_actor"):
                batch = supervised_batch([self.examples[row] for row in self.order.next_batch()[mine]])
                denominators = global_denominators(batch, self.mesh)
                micros = micro_batches(
                    batch, self.plan.micro_batch, alignment=self.mesh.sequence_alignment, device=self.mesh.device
                )
                report = self.engine.update(micros, SupervisedLoss(self.log_probs, denominators))
                step.record(report.metrics)
                step.record({"sft/grad_norm": report.grad_norm, "sft/lr": report.learning_rate})
            step.finish(global_tokens(batch, self.mesh))
        return self.loop.outcome

    def close(self) -> None:
        """Ends what evaluates, after everything else that communicates."""
        self.loop.close()


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
