"""The folder of a run: where everything in it stands, and the small files that describe the run."""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RunFolder:
    """`runs/NAME`. One rank writes the shared files; each rank writes its own log, and a failing one `status.json`."""

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

    def begin(self) -> None:
        """A new attempt at the run: a failure that `status.json` tells of by now is that of an earlier one."""
        if self._last()["state"] == "failed":
            self._write_status("running", self._last()["step"], None)

    def status(self, state: str, step: int, exit_code: int | None = None) -> None:
        """Replaces `status.json` in one piece: `state` is running, done or stopped. A failure of this attempt, which
        another rank has told since `begin`, stays."""
        if self._last()["state"] != "failed":
            self._write_status(state, step, exit_code)

    def failed(self, exit_code: int) -> None:
        """Marks the run as failed at the step that `status.json` names, 0 where it had not begun."""
        self._write_status("failed", self._last()["step"], exit_code)

    @property
    def state(self) -> str | None:
        """What `status.json` says of the run: running, done, stopped or failed; None where it says nothing."""
        return self._last()["state"]

    def _last(self) -> dict[str, Any]:
        """What `status.json` says; of a run that has none, or one that a crash of the machine has cut, nothing."""
        try:
            entry = json.loads((self.path / "status.json").read_text(encoding="utf-8"))
            return {"state": entry["state"], "step": entry["step"]}
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return {"state": None, "step": 0}

    def _write_status(self, state: str, step: int, exit_code: int | None) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        entry = {"state": state, "step": step, "exit_code": exit_code, "pid": os.getpid(), "time": time.time()}
        replace_file(self.path / "status.json", json.dumps(entry, indent=1))

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
    """Writes a file so that a reader sees the old one or the new one, never a part. Of writers the last wins."""
    # A name of its own for each: of processes that shared one, all but the first would find it gone.
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
