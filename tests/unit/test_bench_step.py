"""The benchmark of whole steps, without ranks: what it tells of layouts that end, fail, don't fit or are cut off."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import pytest

from tests.support.tools import load_tool

bench = load_tool("bench_step")
GIB = 2**30
SIZES = ["--shape", "tiny-qwen3", "--layers", "2", "--prompts", "4", "--lengths", "16", "8", "--micro-batch", "2"]


def line(step: int, seconds: float, speed: float, held: float = 1.0) -> dict[str, float]:
    return {
        "step": step, "time/step": seconds, "time/rollout": seconds / 2, bench.SPEED: speed, bench.PEAK: 3 * GIB,
        "hybrid/held_asleep_bytes": held * GIB,
    }  # fmt: skip


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands for running: pp 2 is cut off in its second step, dp 2 has no memory, cp 2 fails; returns what was run."""
    started: list[str] = []

    def run(
        command: Sequence[str], seconds: float | None, output: IO[bytes], grace: float = 0.0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> int | None:  # fmt: skip
        words = dict(word.split("=", 1) for word in command if "=" in word)
        run_dir = Path(words["trainer.run_dir"])
        started.append(run_dir.name)
        assert seconds == 30
        run_dir.mkdir()
        steps = [line(1, 9.0, 10.0), line(2, 2.0, 400.0), line(3, 4.0, 200.0, held=1.25)]
        if run_dir.name == "pp=2":
            steps = steps[:2]
        if run_dir.name in ("dp=2", "cp=2"):
            steps = []
            output.write(b"torch.OutOfMemoryError: out" if run_dir.name == "dp=2" else b"Traceback: a broken rank")
            output.flush()
        for count in range(len(steps) + 1):
            (run_dir / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps[:count]))
            meanwhile()
        return {"tp=1": 0, "pp=2": None}.get(run_dir.name, 1)

    monkeypatch.setattr(bench.limited, "run", run)
    monkeypatch.setattr(bench.limited, "end_on_sigterm", lambda: None)
    return started


def call(folder: Path, *words: str) -> int:
    return int(bench.main([*SIZES, "--steps", "3", "--limit", "30", "--out", str(folder), *words]))


def test_layouts_that_fail_are_told_and_the_others_go_on(
    tmp_path: Path, start: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(tmp_path, "--layouts", "tp=1", "pp=2", "tp=3", "dp=2", "cp=2") == 1
    told = capsys.readouterr().out
    assert start == ["tp=1", "pp=2", "dp=2", "cp=2"]  # tp 3 does not divide the heads: nothing is started
    assert "tp=1: step 3: 4.00 s, 200 tokens/s/GPU" in told and "a broken rank" in told
    rows = {cells[0]: cells[1:] for row in told.splitlines() if (cells := row.split()) and "(" in row}
    assert rows["time/step"] == ["3", "(1.00)", "2", "(0.67)"]  # of steps 2 and 3; of step 2 alone
    assert rows[bench.SPEED] == ["300", "(1.00)", "400", "(1.33)"]
    (summary,) = [row for row in told.splitlines() if row.startswith("summary: ")]
    assert summary.startswith(
        "summary: tp=1 300 tokens/s/GPU; pp=2 1.33 of it; pp=2 cut off after 30 s; tp=3 does not fit"
    )
    assert "dp=2 does not fit: the GPU's memory is not enough; cp=2 failed with exit code 1" in summary


def test_finished_layouts_are_read_unless_something_changed(tmp_path: Path, start: list[str]) -> None:
    assert call(tmp_path, "--layouts", "tp=1") == 0 == call(tmp_path, "--layouts", "tp=1")
    assert start == ["tp=1"]
    call(tmp_path, "--layouts", "tp=1", "actor.optim.lr=0.5")
    assert start == ["tp=1", "tp=1"]


@pytest.mark.parametrize(("most", "code"), [("300", 0), ("200", 1)])
def test_growth_after_the_second_step(
    tmp_path: Path, start: list[str], capsys: pytest.CaptureFixture[str], most: str, code: int
) -> None:
    assert call(tmp_path, "--layouts", "tp=1", "--each-step", "--flat-mib", most) == code
    assert "summary: tp=1 over 3 steps: asleep_bytes +256.0 MiB" in capsys.readouterr().out


def test_metrics_that_are_asked_for(tmp_path: Path, start: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert call(tmp_path, "--metrics", "time/rollout", "hybrid/probe", "--layouts", "tp=1") == 0
    assert "summary: tp=1 time/rollout 2.5, hybrid/probe in no step\n" in capsys.readouterr().out
