"""What surrounds every step, whatever is trained: numbers, metrics, evaluation, checkpoints, stopping, the end.

The algorithm is the body of `for step in loop.steps()`; this file knows none.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from megappo.algorithms.kl import KLController
from megappo.config.checkpoint_folder import checkpoint_to_resume
from megappo.config.evaluation_metrics import best_mode
from megappo.config.experiment import ExperimentConfig
from megappo.data.feed import Resumable
from megappo.data.tokenizer import Tokenizer
from megappo.engines.kernels import kernels_of
from megappo.engines.offload import NO_MEMORY, Memory
from megappo.engines.rollout import Progress
from megappo.errors import ConfigError, ExitCode
from megappo.experience.sample import RolloutSample
from megappo.models.build import ModelSpec
from megappo.observe.memory import AbsentBytes, PeakMemory
from megappo.observe.metrics import Stopwatch, mean_of
from megappo.observe.run_folder import RunFolder
from megappo.parallel.collectives import broadcast_object
from megappo.parallel.mesh import Mesh
from megappo.trainer.best import BestEvaluation
from megappo.trainer.checkpoint import (
    CheckpointStore,
    LoopState,
    SavedFile,
    random_state,
    restore_random_state,
)
from megappo.trainer.export import export_model
from megappo.trainer.reporter import Reporter
from megappo.trainer.samples import gathered_rows
from megappo.trainer.saved_role import SavedRole
from megappo.trainer.stop import StopSignal
from megappo.workers.reward import ScoredSamples


class Evaluates(Protocol):
    """What measures the thing that is trained on held-out data."""

    @property
    def sets(self) -> Mapping[str, Sequence[Any]]:
        """The held-out data sets by their names."""
        ...

    def run(self, progress: Progress | None = None) -> dict[str, float]:
        """Metrics `eval/<data set>/…`. A collective call."""
        ...

    def close(self) -> None:
        """Ends what it has started."""
        ...


@dataclass(frozen=True)
class LoopParts:
    """What the loop saves, shows and evaluates of the thing that is trained."""

    total_steps: int
    spec: ModelSpec
    tokenizer: Tokenizer
    roles: Mapping[str, SavedRole]
    order: Resumable
    controller: KLController | None
    evaluator: Evaluates | None
    exported_role: str = "actor"
    files: Mapping[str, SavedFile] = field(default_factory=dict)
    memory: Memory = NO_MEMORY
    absent: AbsentBytes = field(default_factory=AbsentBytes)


class Step:
    """One step as its loop body sees it: its number, its clock, and the place for its metrics."""

    def __init__(
        self,
        number: int,
        reporter: Reporter,
        world_size: int,
        peak: PeakMemory,
        memory: Memory = NO_MEMORY,
        asked_to_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.number = number
        self.is_given_up = False
        """Whether the run ends in the middle of this step, as it was before it."""
        self._asked_to_stop = asked_to_stop
        self._peak = peak
        self._memory = memory
        self._world_size = world_size
        self.metrics: dict[str, float] = {}
        self._updates: list[dict[str, float]] = []
        self._num_generated = 0
        self._clock = Stopwatch()
        self._reporter = reporter

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures `time/<name>`, and moves to host memory what the next phase may not need."""
        self._reporter.phase(self.number, name)
        with self._clock.phase(name):
            self._peak.begin_phase()
            yield
            # A phase may come several times in a step: its peak is that of all of them.
            found = self._peak.metrics(name).items()
            peaks = {peak: max(value, self.metrics.get(peak, 0.0)) for peak, value in found}
            self.metrics |= peaks | self._memory.metrics(name)
            self._memory.rest()

    def progress(self, done: int, total: int) -> None:
        """Shows how far the phase of the moment is."""
        self._reporter.progress(done, total)

    def event(self, kind: str, **details: Any) -> None:
        """Something that happened within the step, for `events.jsonl`."""
        self._reporter.event(self.number, kind, **details)

    def gives_up(self) -> bool:
        """Whether a signal asks to stop: then the body leaves the step, which may not have changed yet what a
        checkpoint holds but the order of prompts and random states. A collective call over the world."""
        self.is_given_up = self._asked_to_stop()
        return self.is_given_up

    def record(self, metrics: Mapping[str, float]) -> None:
        self.metrics |= metrics

    def record_update(self, metrics: Mapping[str, float]) -> None:
        """Metrics of one of the step's optimizer steps; the step reports their mean."""
        self._updates.append(dict(metrics))

    def count_generated(self, num_tokens: int) -> None:
        """Tokens that all ranks generated in the phase `rollout`, whether or not they are trained on."""
        self._num_generated += num_tokens

    def finish(self, num_tokens: int) -> None:
        """Ends the step's clock. `num_tokens` are the tokens of its sequences over all ranks, prompts included."""
        self.metrics |= mean_of(self._updates) | self._clock.times()
        self.metrics |= throughput(self.metrics, num_tokens, self._num_generated, self._world_size)
        self.metrics["perf/peak_memory_bytes"] = float(self._peak.of_run)


class Loop:
    """Numbers the steps, and does after each what the configuration asks for. Every method is a collective call."""

    def __init__(self, config: ExperimentConfig, mesh: Mesh, parts: LoopParts) -> None:
        self._config = config
        self._mesh = mesh
        self._parts = parts
        self._folder = RunFolder(Path(config.trainer.run_dir))
        kernels = next((kernels_of(role.model, role.optimizer) for role in parts.roles.values() if role.optimizer), {})
        self._reporter = Reporter(config, mesh, self._folder, parts.total_steps, kernels)
        self._store = CheckpointStore(
            self._folder.checkpoints,
            mesh,
            parts.spec,
            Path(config.model.tokenizer_folder),
            keep=config.trainer.max_checkpoints,
        )
        self._stop = StopSignal(mesh)
        self._best = BestEvaluation(config.trainer.best_metric, best_mode(config.trainer))
        self._peak = PeakMemory(parts.absent)
        self._last_saved = 0
        self._named_step: int | None = None
        self._checkpoint_seconds = 0.0
        self.outcome = ExitCode.DONE

    def steps(self) -> Iterator[Step]:
        """The steps of the run from where it starts or resumes; what follows a step happens when the next is asked
        for."""
        self._peak.begin_phase()  # the engine started awake, and sleeps now
        start = self._start()
        self._parts.memory.rest()
        for number in range(start + 1, self._parts.total_steps + 1):
            before, drawn = self._state(number - 1), random_state()
            step = Step(
                number, self._reporter, self._mesh.world_size, self._peak, self._parts.memory, self._stop.requested
            )
            yield step
            if step.is_given_up:
                restore_random_state(drawn)
                self._stop_within(number, before)
                return
            self._after(step)
            if number < self._parts.total_steps and self._stop.requested():
                self._stop_after(number)
                return
        self._end()

    def close(self) -> None:
        """Ends reward processes and the rollout engine, which may take the process groups with it."""
        if self._parts.evaluator is not None:
            self._parts.evaluator.close()

    def _start(self) -> int:
        """Resumes or starts; returns the number of steps that lie behind."""
        # One rank looks and tells: on a shared file system the others may not see yet what was written last.
        # With --resume each process of srun has looked for itself too, so that `trainer.resume` may differ among them.
        found = checkpoint_to_resume(self._config) if self._mesh.is_writer else None
        is_named = self._config.trainer.resume != "auto"
        path, is_named = broadcast_object((found, is_named), self._mesh.world_group, 0)
        if path is None:
            self._reporter.start(resumed_at=None)
            if self._config.trainer.val_before_train:
                self._reporter.step(0, {}, self._evaluate(0))
            return 0
        state = self._store.load(path, self._parts.roles, self._parts.files)
        if state.seed != self._config.trainer.seed:
            raise ConfigError(
                f"trainer.seed: {self._config.trainer.seed}, but {path} was trained with {state.seed}; "
                f"set trainer.seed={state.seed} or start a new run"
            )
        if state.step > self._parts.total_steps:
            raise ConfigError(
                f"trainer.total_steps: the run would end after step {self._parts.total_steps}, but {path} is "
                f"already at step {state.step}; set trainer.total_steps={state.step} or more, or resume "
                "from an older checkpoint"
            )
        self._parts.order.load_state_dict(state.data)
        if self._parts.controller is not None and state.kl_controller is not None:
            self._parts.controller.load_state_dict(state.kl_controller)
        self._best.load_state_dict(state.best)
        if self._config.trainer.best_metric is not None:
            self._store.restore_best(path, self._best.step)
        self._last_saved = state.step
        self._named_step = state.step if is_named else None
        self._reporter.start(resumed_at=state.step, is_reported=state.unreported is None)
        if state.unreported is not None:
            if is_named:
                self._last_saved = 0  # that checkpoint may be another run's
            self._report(state.step, state.unreported)
        return state.step

    def keep_samples(self, step: int, samples: Sequence[RolloutSample], scored: ScoredSamples) -> None:
        """Writes some of the step's rollouts where it is their turn (`observe.samples_freq`)."""
        observe = self._config.observe
        if observe.samples_freq and (step == 1 or step % observe.samples_freq == 0):
            self._reporter.samples(step, gathered_rows(samples, scored, self._mesh, observe.samples_per_step))

    def _after(self, step: Step) -> None:
        number = step.number
        step.metrics |= {
            "data/epoch": float(self._parts.order.epoch),
            "data/prompts_seen": float(self._parts.order.prompts_seen),
            "time/checkpoint": self._checkpoint_seconds,
        }
        # Before the evaluation: one that fails, for a judge is down, must not cost the steps since the last checkpoint.
        if self._is_saved(number) and self._is_evaluated(number):
            self._save(replace(self._state(number), unreported=step.metrics))
        self._report(number, step.metrics)
        if self._is_saved(number):
            self._save(self._state(number))

    def _report(self, number: int, metrics: Mapping[str, float]) -> None:
        """Evaluates where that is due, writes the step's metrics, and marks its checkpoint where it is the best."""
        was_saved, metric = number == self._last_saved, str(self._config.trainer.best_metric)
        evaluation = self._evaluate_after(number)
        # Before a checkpoint without `unreported`: the metrics must not lack a step that a resumed run does not repeat.
        self._reporter.step(number, metrics, evaluation)
        if self._best.improves(number, evaluation):
            self._save(self._state(number))
            self._store.mark_best(number)
            self._reporter.event(number, "best", **{metric: evaluation[metric]})
        if was_saved:
            self._store.note_evaluation(number, self._best.state_dict())

    def _is_saved(self, step: int) -> bool:
        """Whether the configuration asks for a checkpoint after this step."""
        trainer = self._config.trainer
        is_due = trainer.save_freq > 0 and step % trainer.save_freq == 0
        return is_due or (trainer.save_last and step == self._parts.total_steps)

    def _is_evaluated(self, step: int) -> bool:
        """Whether an evaluation follows this step."""
        test_freq, evaluator = self._config.trainer.test_freq, self._parts.evaluator
        is_due = step == self._parts.total_steps or (test_freq > 0 and step % test_freq == 0)
        return is_due and evaluator is not None and bool(evaluator.sets)

    def _evaluate_after(self, step: int) -> dict[str, float]:
        """The evaluation that follows the step, nothing where there is none. It leaves the random states as they were:
        a checkpoint that was saved before it has those."""
        if not self._is_evaluated(step):
            return {}
        drawn = random_state()
        evaluation = self._evaluate(step)
        restore_random_state(drawn)
        return evaluation

    def _evaluate(self, step: int) -> dict[str, float]:
        evaluator = self._parts.evaluator
        if evaluator is None or not evaluator.sets:
            return {}
        self._reporter.phase(step, "evaluate")
        self._parts.memory.rest()
        # A phase for memory's peaks: the engine wakes and falls asleep in it.
        self._peak.begin_phase()
        evaluation = evaluator.run(self._reporter.progress)
        self._peak.begin_phase()
        self._parts.memory.rest()
        return evaluation

    def _state(self, step: int) -> LoopState:
        """What a checkpoint of this moment, after `step`, holds of the loop."""
        controller = self._parts.controller
        return LoopState(
            step=step,
            data=self._parts.order.state_dict(),
            kl_controller=controller.state_dict() if controller is not None else None,
            seed=self._config.trainer.seed,
            best=self._best.state_dict(),
        )

    def _save(self, state: LoopState) -> None:
        step = state.step
        if step == self._last_saved:
            return
        begin = time.perf_counter()
        self._reporter.phase(step, "checkpoint")
        self._parts.memory.need_all()
        path = self._store.save(self._parts.roles, state, self._parts.files)
        # Reported with the next step: the metrics of this one are on disk, or in the checkpoint.
        self._parts.memory.rest()
        self._checkpoint_seconds = time.perf_counter() - begin
        self._reporter.event(step, "checkpoint", path=str(path), seconds=self._checkpoint_seconds)
        self._last_saved = step

    def _stop_after(self, step: int) -> None:
        self._save(self._state(step))
        self._stopped(step, "a signal asked to stop")

    def _stop_within(self, step: int, before: LoopState) -> None:
        """Ends the run as it was `before` the step, which a resumed run makes anew. Before the first one there is
        nothing to save: the resumed run starts anew."""
        if before.step == self._named_step:
            self._last_saved = 0  # that checkpoint may lie elsewhere, or not be the folder's newest: the resumed run's
        self._save(before)
        self._stopped(before.step, f"a signal asked to stop, in the middle of step {step}, which is made anew")

    def _stopped(self, step: int, reason: str) -> None:
        self._reporter.event(step, "stopped", reason=reason)
        self.outcome = ExitCode.STOPPED_AFTER_SAVING
        self._reporter.finish(step, self.outcome)

    def _end(self) -> None:
        total = self._parts.total_steps
        if self._config.trainer.export_hf:
            self._parts.memory.need_all()
            parts = self._parts
            model, tokenizer_folder = parts.roles[parts.exported_role].model, Path(self._config.model.tokenizer_folder)
            export_model(self._folder.hf, total, model, parts.spec, self._mesh, tokenizer_folder)
        self._reporter.finish(total, self.outcome)


def throughput(metrics: Mapping[str, float], num_tokens: int, num_generated: int, world_size: int) -> dict[str, float]:
    """`perf/…` of a step and `rollout/tokens_per_second` (generated tokens, all ranks), from its times."""
    rates = {"perf/tokens_per_second_per_gpu": num_tokens / metrics["time/step"] / world_size}
    if metrics.get("time/rollout"):
        rates["rollout/tokens_per_second"] = num_generated / metrics["time/rollout"]
    return rates
