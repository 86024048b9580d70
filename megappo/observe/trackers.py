"""Where metrics go: one class of four methods each. The console is in `console.py`."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from megappo.observe.run_folder import replace_file


class Tracker(Protocol):
    """Receives the metrics of a run, on the one rank that writes."""

    def start(self, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Begins; `resumed_at` is the step that the run goes on from: what was logged after it is void."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of one step, under their flat names."""
        ...

    def event(self, step: int, kind: str, details: Mapping[str, Any]) -> None:
        """Something that happened: a guardrail, a signal, a checkpoint."""
        ...

    def finish(self) -> None:
        """Everything is on disk (or sent) when this returns."""
        ...


class JsonlTracker:
    """`metrics.jsonl`: one object a step, with `step`, `wall_time` and the metrics.

    A value that is not finite is null.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def start(self, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Keeps the whole lines up to `resumed_at`, none where the run is new."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        kept = [] if resumed_at is None else [line for line in _complete_lines(self._file) if _step(line) <= resumed_at]
        replace_file(self._file, "".join(line + "\n" for line in kept))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one line, on disk when this returns."""
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        entry = {"step": step, "wall_time": time.time(), **values}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def event(self, step: int, kind: str, details: Mapping[str, Any]) -> None:
        """Events have a file of their own (`RunFolder.event`)."""

    def finish(self) -> None:
        """Every line is already on disk."""


class TensorBoardTracker:
    """Event files for TensorBoard; a resumed run hides what was logged after its first step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: Any = None

    def start(self, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Opens an event file; what was logged after `resumed_at` is hidden."""
        # Seconds to import; runs without it should not pay for it.
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self._folder), purge_step=None if resumed_at is None else resumed_at + 1)
        if resumed_at is None:
            self._writer.add_text("config", "```\n" + json.dumps(config, indent=1, default=str) + "\n```")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def event(self, step: int, kind: str, details: Mapping[str, Any]) -> None:
        self._writer.add_text("events", f"{kind}: {json.dumps(details, default=str)}", step)

    def finish(self) -> None:
        self._writer.close()


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The objects of a `metrics.jsonl`, a torn last line left out."""
    return [json.loads(line) for line in _complete_lines(file)]


def _complete_lines(file: Path) -> list[str]:
    """Lines that end: one that a crash cut short is dropped."""
    if not file.exists():
        return []
    return file.read_text(encoding="utf-8").split("\n")[:-1]


def _step(line: str) -> int:
    return int(json.loads(line)["step"])
