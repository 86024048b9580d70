"""Runs side by side: what stands in the tables, and when runs count as having learned alike."""

import json
from pathlib import Path

import pytest

from tests.support.tools import load_tool

tool = load_tool("compare_runs")


def write_run(folder: Path, scores: list[float | None], **others: float) -> Path:
    """A run whose step k has the k-th score; `others` are metrics of its last step."""
    folder.mkdir()
    lines = [{"step": step, "wall_time": 5.0, "reward/score": score} for step, score in enumerate(scores, start=1)]
    lines[-1] |= {name.replace("__", "/"): value for name, value in others.items()}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "one", [0.125, 0.25, 0.5, 0.5], eval__test__exact_match=0.25)
    two = write_run(tmp_path / "dp=2", [0.125, 0.5, None, 0.375], eval__test__exact_match=0.5)
    assert tool.main([str(one), str(two)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:6] == [
        "| reward/score | one | dp=2 |",
        "|---|---|---|",
        "| 1 | 0.125 | 0.125 (1.00) |",
        "| 2 | 0.25 | 0.5 (2.00) |",
        "| 3 | 0.5 | - |",
        "| 4 | 0.5 | 0.375 (0.75) |",
    ]
    assert "| 4 | 0.25 | 0.5 (2.00) |" in lines
    # Of steps 1, 2 and 4: 0, +1/4, -1/8.
    assert "| reward/score | dp=2 | 0.125 | 0.375 | +0.25 | 2 | +0.04167 |" in lines
    assert "| eval/test/exact_match | dp=2 | 0.5 | 0.5 | +0.25 | 4 | +0.25 |" in lines


def test_every_so_many_steps_and_the_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "one", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    tool.main([str(run), "--metrics", "reward/score", "--every", "4"])
    table = capsys.readouterr().out.partition("\n\n")[0]
    assert [line.split(" | ")[0] for line in table.splitlines()[2:]] == ["| 1", "| 5", "| 6"]


# The first run rises by 0.4, from 0.1 to 0.5, so the others have to rise by 0.2.
@pytest.mark.parametrize(
    ("scores", "code"),
    [([0.1, 0.2, 0.2, 0.3, 0.4, 0.4], 0), ([0.1, 0.1, 0.1, 0.2, 0.2, 0.2], 1), ([0.5, 0.5, 0.4, 0.3, 0.2, 0.1], 1)],
)
def test_learned_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str], scores: list[float], code: int) -> None:
    one = write_run(tmp_path / "one", [0.1, 0.1, 0.2, 0.3, 0.5, 0.5])
    other = write_run(tmp_path / "pp=2", scores)
    assert tool.main([str(one), str(other), "--learned", "reward/score"]) == code
    told = capsys.readouterr().out.splitlines()[-1]
    assert told.startswith("summary: reward/score: one 0.1 to 0.5; pp=2 ")
    assert ("NOT" in told) == bool(code)


def test_a_first_run_that_does_not_learn_is_told(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, [0.3, 0.3, 0.3]) for name in ("one", "two")]
    assert tool.main([*map(str, runs), "--learned", "reward/score"]) == 1


def test_a_folder_without_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(tmp_path)]) == 1
    assert f"{tmp_path} holds no metrics.jsonl" in capsys.readouterr().err
