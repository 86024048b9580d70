"""The folder of a run: where everything in it stands, and the small files that describe the run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunFolder:
    """`runs/NAME`. One rank writes the shared files; each rank writes its own log."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def hf(self) -> Path:
        """Exports as Hugging Face folders."""
        return self.path / "hf"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    def log(self, rank: int) -> Path:
        return self.path / "logs" / f"rank-{rank:05d}.log"

    def describe(self, config_yaml: str, environment: Mapping[str, Any]) -> None:
        """Writes `config.yaml` and `environment.json`."""
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "config.yaml").write_text(config_yaml, encoding="utf-8")
        (self.path / "environment.json").write_text(json.dumps(environment, indent=1), encoding="utf-8")

    def status(self, state: str, step: int, exit_code: int | None = None) -> None:
        """Replaces `status.json` in one piece: `state` is running, done, stopped or failed."""
        self.path.mkdir(parents=True, exist_ok=True)
        entry = {"state": state, "step": step, "exit_code": exit_code, "pid": os.getpid(), "time": time.time()}
        replace_file(self.path / "status.json", json.dumps(entry, indent=1))

    def failed(self, exit_code: int) -> None:
        """Marks the run as failed at the step that `status.json` names, 0 where it had not begun."""
        file = self.path / "status.json"
        step = json.loads(file.read_text(encoding="utf-8"))["step"] if file.exists() else 0
        self.status("failed", step, exit_code)

    def event(self, step: int, kind: str, **details: Any) -> None:
        """Appends one line to `events.jsonl`."""
        entry = {"step": step, "event": kind, "time": time.time(), **details}
        with (self.path / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def samples(self, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Writes `samples/step-NNNNNN.jsonl`, one object a rollout; returns its path."""
        file = self.path / "samples" / f"step-{step:06d}.jsonl"
        file.parent.mkdir(exist_ok=True)
        replace_file(file, "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))
        return file


def replace_file(path: Path, text: str) -> None:
    """Writes a file so that a reader sees the old one or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
