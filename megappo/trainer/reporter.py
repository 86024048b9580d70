"""Tells the world of a run, on the rank that writes; on the others every call is silent."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megappo.config.experiment import ExperimentConfig
from megappo.config.load import to_yaml
from megappo.errors import ExitCode
from megappo.observe.console import Console
from megappo.observe.environment import describe_environment
from megappo.observe.run_folder import RunFolder
from megappo.observe.trackers import JsonlTracker, TensorBoardTracker, Tracker, read_metrics
from megappo.parallel.mesh import Mesh

_log = logging.getLogger(__name__)


class Reporter:
    """Console, trackers and the run folder's small files, behind one face for the loop."""

    def __init__(
        self, config: ExperimentConfig, mesh: Mesh, folder: RunFolder, total_steps: int, kernels: Mapping[str, str]
    ) -> None:
        self._config = config
        self._kernels = kernels
        self._mesh = mesh
        self._folder = folder
        self._writes = mesh.is_writer
        self._console = Console(total_steps) if self._writes and config.observe.console else None
        self._trackers: list[Tracker] = []
        if self._writes:
            self._trackers.append(JsonlTracker(folder.metrics))
            if config.observe.tensorboard:
                self._trackers.append(TensorBoardTracker(folder.tensorboard))

    def start(self, resumed_at: int | None, *, is_reported: bool = True) -> None:
        """Opens logs and trackers; `resumed_at` is the step that the run goes on from, whose own metrics are still to
        come unless it `is_reported`."""
        _log_to(self._folder.log(self._mesh.rank))
        _log.info("rank grid:\n%s", self._mesh)
        kernels = " · ".join(f"{part} {name}" for part, name in self._kernels.items())
        _log.info("kernels: %s", kernels)
        if not self._writes:
            return
        self._folder.describe(to_yaml(self._config), describe_environment(self._mesh.world_size, self._kernels))
        self._folder.status("running", resumed_at or 0)
        for tracker in self._trackers:
            logged = resumed_at if resumed_at is None or is_reported else resumed_at - 1
            tracker.start(self._config.model_dump(mode="json"), logged)
        if resumed_at is not None:
            self.event(resumed_at, "resumed")
        if self._console:
            where = "" if resumed_at is None else f", going on after step {resumed_at}"
            self._console.say(
                f"{self._config.trainer.kind} in {self._folder.path}{where}\n{self._mesh}\nkernels: {kernels}"
            )

    def phase(self, step: int, name: str) -> None:
        if self._console:
            self._console.phase(step, name)

    def progress(self, done: int, total: int) -> None:
        if self._console:
            self._console.progress(done, total)

    def step(self, step: int, metrics: Mapping[str, float], evaluation: Mapping[str, float]) -> None:
        """The metrics of a step and of the evaluation after it; step 0 has only an evaluation."""
        if not self._writes:
            return
        for tracker in self._trackers:
            tracker.log(step, {**metrics, **evaluation})
        self._folder.status("running", step)
        if self._console and metrics:
            self._console.step(step, metrics)
        if self._console and evaluation:
            self._console.evaluation(step, evaluation)

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        if self._writes:
            self._folder.samples(step, rows)

    def event(self, step: int, kind: str, **details: Any) -> None:
        if self._writes:
            self._folder.event(step, kind, **details)
            for tracker in self._trackers:
                tracker.event(step, kind, details)

    def finish(self, step: int, outcome: ExitCode) -> None:
        """The last words: how held-out accuracy moved, where things are, the state for those who ask later."""
        if not self._writes:
            return
        state = "done" if outcome is ExitCode.DONE else "stopped"
        self._folder.status(state, step, int(outcome))
        for tracker in self._trackers:
            tracker.finish()
        if self._console:
            for line in exact_match_lines(self._folder.metrics):
                self._console.say(line)
            self._console.say(f"{state} after step {step}: {self._folder.path}")


def exact_match_lines(metrics_file: Path) -> list[str]:
    """One line a data set: exact match at the first and at the last evaluation of the run."""
    lines = read_metrics(metrics_file)
    names = {name for line in lines for name in line if name.startswith("eval/") and name.endswith("/exact_match")}
    told = []
    for name in sorted(names):
        seen = [(line["step"], line[name]) for line in lines if name in line]
        (first, before), (last, after) = seen[0], seen[-1]
        data_set = name.split("/")[1]
        told.append(
            f"exact match on {data_set}: {100 * before:.1f}% at step {first}, {100 * after:.1f}% at step {last} "
            f"({100 * (after - before):+.1f} points)"
        )
    return told


def _log_to(file: Path) -> None:
    """Sends this rank's log to its own file; messages of warning level also reach the terminal of whoever listens."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    logging.getLogger("megappo").setLevel(logging.INFO)
