"""The table of learning curves from metrics on disk: which runs count, their means, and repeated steps."""

import json
from pathlib import Path

import pytest

from megappo.config.checks import check_experiment
from megappo.config.load import load_experiment
from megappo.config.problem import Severity
from tests.support.ranks import ROOT
from tests.support.tools import load_tool

tool = load_tool("learning_curves")


def write_run(folder: Path, name: str, seed: int, lines: list[dict[str, float]]) -> None:
    run_dir = tool.run_folder(folder, name, seed)
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_table_of_finished_runs(tmp_path: Path) -> None:
    start = {"step": 0, tool.EXACT_MATCH: 0.2}
    for seed, end in enumerate((0.6, 0.8)):
        repeated = [{"step": 1, "kl/mean": 9.0}, {"step": 1, "kl/mean": 0.01}]
        write_run(tmp_path, "grpo", seed, [start, *repeated, {"step": 2, "kl/mean": 0.03, tool.EXACT_MATCH: end}])
    write_run(tmp_path, "rloo", 0, [start, {"step": 1, "kl/mean": 0.01}])  # not at its end
    curves = tool.read_curves(tmp_path, 2)
    assert list(curves) == ["grpo"]
    assert tool.table_text(curves).splitlines()[2] == "| grpo | 2 | 0.200 | 0.700 (0.600 to 0.800) | 0.020 | - |"
    assert not tool.is_finished(tool.run_folder(tmp_path, "rloo", 0), 2)


def test_table_names_the_first_coefficient_and_the_last(tmp_path: Path) -> None:
    steps = [{"step": step, "kl/mean": 0.1, "kl/reward_coef": 0.02 * step} for step in range(1, 41)]
    write_run(tmp_path, "reward kl adaptive", 0, [{"step": 0, tool.EXACT_MATCH: 0.2}, *steps[:-1]])
    end = tool.run_folder(tmp_path, "reward kl adaptive", 0) / "metrics.jsonl"
    end.write_text(end.read_text() + json.dumps(steps[-1] | {tool.EXACT_MATCH: 0.5}) + "\n")
    row = tool.table_text(tool.read_curves(tmp_path, 40)).splitlines()[2]
    # The mean over steps 21 to 40: 0.02 · 30.5
    assert row == "| reward kl adaptive | 1 | 0.200 | 0.500 | 0.100 | 0.020; 0.610 |"


@pytest.mark.parametrize("name", [*tool.VARIANTS, *tool.CONTROLLER])
def test_every_variant_is_a_sound_experiment(name: str) -> None:
    config = load_experiment(tool.FILE, [*(tool.VARIANTS | tool.CONTROLLER)[name], "layout.tp=1"])
    problems = check_experiment(config, 1)
    # The demo's files are there only after `make demo`.
    missing = ("model.path", "data.train_files", "data.val_files")
    others = [problem for problem in problems if not problem.path.startswith(missing)]
    # What the file says of the critic, or of a controller, that a variant turns off.
    assert [problem.text() for problem in others if "does nothing" not in problem.reason] == []
    assert all(problem.severity is Severity.WARNING for problem in others)
    assert config.needs_reference
    assert Path(tool.FILE).is_relative_to(ROOT)
