"""The comparison's table from runs on disk: which seeds count, and what stands in each column."""

import json
from pathlib import Path

import pytest

from megappo.config.stages import read_stages
from tests.support.tools import load_tool

tool = load_tool("compare_distillation")


def write_run(run_dir: Path, state: str, *measured: float) -> None:
    run_dir.mkdir(parents=True)
    lines = [{"step": 20 * place, tool.EXACT_MATCH: value} for place, value in enumerate(measured)]
    lines.insert(1, {"step": 1})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / "status.json").write_text(json.dumps({"state": state, "step": 1}))


def write_seed(folder: Path, start: float, dpo: float, dense: float, at_end: float, state: str = "done") -> None:
    write_run(folder / "dpo", "done", start, 0.1, dpo)
    write_run(folder / "ppo", "done", start, 0.2, dense)
    write_run(folder / "at-end" / "ppo", state, start, at_end)


def test_table_of_seeds(tmp_path: Path) -> None:
    write_seed(tmp_path / "seed-0", 0.6, 0.85, 0.9, 0.8)
    write_seed(tmp_path / "seed-1", 0.5, 0.75, 0.8, 0.7)
    write_seed(tmp_path / "seed-2", 0.5, 0.75, 0.8, 0.7, state="stopped")
    found = {seed: tool.result(tmp_path / f"seed-{seed}") for seed in range(4)}
    assert found[2] is None and found[3] is None
    lines = tool.table_text({0: found[0], 1: found[1]}).splitlines()
    assert lines[2:] == [
        "| 0 | 60.0% | 85.0% | 90.0% | 80.0% |",
        "| 1 | 50.0% | 75.0% | 80.0% | 70.0% |",
        "| mean | 55.0% | 80.0% | 85.0% | 75.0% |",
    ]


def test_both_runs_of_ppo_differ_in_when_the_reward_is_given_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[list[str], list[str]]] = []
    monkeypatch.setattr(tool, "run", lambda settings, options: calls.append((list(settings), list(options))))
    tool.train(Path("out"), 7, ["stages.ppo.trainer.total_steps=3"])
    (chain, _), (again, options) = calls
    assert options == ["--stage", "ppo"]
    dense, at_end = (read_stages(tool.FILE, settings, as_planned=True)["ppo"].config for settings in (chain, again))
    (one, correct), (other, same) = dense.reward.parts, at_end.reward.parts
    assert (one.at_end, other.at_end) == (False, True) and correct == same
    assert one.model_copy(update={"at_end": True, "policy": None}) == other.model_copy(update={"policy": None})
    assert dense.trainer.seed == at_end.trainer.seed == 7 and dense.trainer.total_steps == 3
    assert dense.algorithm == at_end.algorithm and dense.actor == at_end.actor
