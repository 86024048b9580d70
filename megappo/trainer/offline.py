"""Training on a fixed data set, whatever is learned: one optimizer step on a batch of its rows is a step of the run.

What is learned is a `Task`: `sft.py`, `reward_model.py`, `dpo.py`. The loop without data of its own is in `loop.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megappo.data.iterate import PromptOrder
from megappo.engines.training import Loss, TrainingEngine, UpdateReport
from megappo.errors import ExitCode
from megappo.experience.batch import ExperienceBatch
from megappo.experience.micro import MicroBatch, micro_batches
from megappo.parallel.context import context_cut
from megappo.parallel.mesh import Mesh
from megappo.planner.batch import MiniBatchPlan
from megappo.trainer.experience_metrics import global_tokens
from megappo.trainer.loop import Loop, Step


class Task(Protocol):
    """What is learned from the rows of a data set."""

    @property
    def sequences_per_row(self) -> int:
        """1, or 2 for pairs, whose sequences stand next to each other and never in two micro-batches."""
        ...

    def batch(self, rows: Sequence[int], step: Step) -> ExperienceBatch:
        """This rank's rows as a batch with all that the loss reads. A collective call."""
        ...

    def loss(self, batch: ExperienceBatch) -> Loss:
        """The loss of a batch, with the denominators of the batches of all ranks. A collective call."""
        ...

    def metrics(self, report: UpdateReport) -> dict[str, float]:
        """An optimizer step as metrics, under the task's own names."""
        ...


@dataclass(frozen=True)
class OfflineTrainer:
    """The loop of a task on the ranks of one training layout. `cut` makes padded or packed micro-batches."""

    mesh: Mesh
    plan: MiniBatchPlan
    order: PromptOrder
    engine: TrainingEngine
    task: Task
    loop: Loop
    cut: Callable[..., list[MicroBatch]] = micro_batches

    def fit(self) -> ExitCode:
        """Trains until the last step, or until a signal asks to stop."""
        share = self.plan.sequences_per_rank
        mine = slice(self.mesh.dp_rank * share, (self.mesh.dp_rank + 1) * share)
        for step in self.loop.steps():
            batch = self.task.batch(self.order.next_batch()[mine], step)
            with step.phase("update_actor"):
                micros = self.cut(
                    batch,
                    self.plan.micro_batch * self.task.sequences_per_row,
                    alignment=self.mesh.sequence_alignment,
                    device=self.mesh.device,
                    context=context_cut(self.mesh),
                )
                step.record(self.task.metrics(self.engine.update(micros, self.task.loss(batch))))
            step.finish(global_tokens(batch, self.mesh))
        return self.loop.outcome

    def close(self) -> None:
        """Ends what evaluates, after everything else that communicates."""
        self.loop.close()
