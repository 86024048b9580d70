"""Numbers of a step with a clock that the test turns, and how the trackers keep them."""

import json
import math
from pathlib import Path

import pytest

from megappo.observe.metrics import Remaining, Stopwatch, mean_of
from megappo.observe.trackers import JsonlTracker, TensorBoardTracker, read_metrics


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_stopwatch_adds_up_phases_also_where_one_fails() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.phase("rollout"):
        clock.seconds += 2.0
    clock.seconds += 0.5  # between phases
    with watch.phase("reward"):
        clock.seconds += 1.0
    with pytest.raises(ValueError), watch.phase("rollout"):
        clock.seconds += 4.0
        raise ValueError
    assert watch.times() == {"time/rollout": 6.0, "time/reward": 1.0, "time/step": 7.5}
    assert list(watch.times()) == ["time/rollout", "time/reward", "time/step"]


def test_mean_of_updates_counts_each_metric_where_it_is_reported() -> None:
    updates = [{"critic/vf_loss": 1.0}, {"critic/vf_loss": 3.0}, {"actor/pg_loss": -0.5}]
    assert mean_of(updates) == {"critic/vf_loss": 2.0, "actor/pg_loss": -0.5}
    assert mean_of([]) == {}


def test_remaining_leaves_out_the_slow_first_step() -> None:
    remaining = Remaining(total_steps=10)
    assert remaining.after(1, 60.0) == 540.0  # nothing else is known yet
    assert remaining.after(2, 2.0) == 16.0
    assert remaining.after(3, 4.0) == 21.0  # 7 steps of (2 + 4) / 2 seconds
    assert remaining.after(10, 3.0) == 0.0


def test_remaining_of_a_resumed_run() -> None:
    remaining = Remaining(total_steps=100)
    assert remaining.after(98, 5.0) == 10.0
    assert remaining.after(99, 1.0) == 1.0


def test_jsonl_keeps_every_digit_and_says_null_for_what_is_no_number(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "run" / "metrics.jsonl")
    tracker.start({}, resumed_at=None)
    tracker.log(1, {"actor/pg_loss": 0.1 + 0.2, "kl/max": math.inf, "kl/mean": math.nan})
    tracker.event(1, "checkpoint", {})
    tracker.finish()
    (line,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert line["actor/pg_loss"] == 0.30000000000000004
    assert line["step"] == 1 and line["wall_time"] > 1.6e9
    assert line["kl/max"] is None and line["kl/mean"] is None


def test_jsonl_goes_on_after_the_step_of_the_checkpoint(tmp_path: Path) -> None:
    """Steps that will be repeated go, so does a line that a crash cut short; a new run starts empty."""
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "reward/score": float(step)}) for step in (0, 1, 2, 3)]
    file.write_text("\n".join(lines) + '\n{"step": 4, "rew')
    assert [line["step"] for line in read_metrics(file)] == [0, 1, 2, 3]
    tracker = JsonlTracker(file)
    tracker.start({}, resumed_at=2)
    assert file.read_text() == "\n".join(lines[:3]) + "\n"
    tracker.log(3, {"reward/score": -1.0})
    assert [(line["step"], line["reward/score"]) for line in read_metrics(file)] == [(0, 0), (1, 1), (2, 2), (3, -1)]
    tracker.start({}, resumed_at=None)
    assert read_metrics(file) == []
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_tensorboard_shows_a_resumed_run_once(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardTracker(tmp_path)
    first.start({"trainer": {"seed": 3}}, resumed_at=None)
    for step in (1, 2, 3):
        first.log(step, {"reward/score": float(step)})
    first.event(3, "checkpoint", {"path": "step-000003"})
    first.finish()
    resumed = TensorBoardTracker(tmp_path)
    resumed.start({}, resumed_at=2)
    resumed.log(3, {"reward/score": 30.0})
    resumed.finish()

    shown = EventAccumulator(str(tmp_path))
    shown.Reload()
    assert [(point.step, point.value) for point in shown.Scalars("reward/score")] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert any("config" in tag for tag in shown.Tags()["tensors"])
