"""Which evaluation was the best so far, by `trainer.best_metric`. Saving its checkpoint is the loop's."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from megappo.config.trainer import BestMode


class BestEvaluation:
    """Remembers the highest value of one metric and its step, or the lowest (`mode`), over resumes too."""

    def __init__(self, metric: str | None, mode: BestMode = "max") -> None:
        self._metric = metric
        self._mode = mode
        self._value: float | None = None
        self._step = 0

    @property
    def step(self) -> int | None:
        """The step of the mark; None where none is set."""
        return None if self._value is None else self._step

    def improves(self, step: int, evaluation: Mapping[str, float]) -> bool:
        """Whether this evaluation is better than all before; of equal ones the first stays the best.

        Step 0 has no checkpoint and sets no mark, and neither does a value that is not finite.
        """
        if self._metric is None or not evaluation:
            return False
        assert self._metric in evaluation, f"{self._metric}, which the configuration was checked for, was not measured"
        value = evaluation[self._metric]
        if step == 0 or not math.isfinite(value) or not self._is_better(value):
            return False
        self._value, self._step = value, step
        return True

    def _is_better(self, value: float) -> bool:
        if self._value is None:
            return True
        return value > self._value if self._mode == "max" else value < self._value

    def state_dict(self) -> dict[str, Any] | None:
        if self._metric is None or self._value is None:
            return None
        return {"metric": self._metric, "mode": self._mode, "value": self._value, "step": self._step}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """A mark of another metric or mode counts no more, nor does one that is not finite; where a checkpoint names no
        mode it is the highest."""
        if state is None or (state["metric"], state.get("mode", "max")) != (self._metric, self._mode):
            return
        if math.isfinite(state["value"]):
            self._value, self._step = state["value"], state["step"]
