"""The memory benchmark: its cases are settings that hold, and what its table shows."""

from pathlib import Path
from typing import IO

import pytest

from megappo.config.checks import check_experiment
from megappo.config.load import load_experiment
from megappo.config.problem import Severity
from tests.support.ranks import ROOT
from tests.support.tools import load_tool

bench = load_tool("bench_memory")
PAGE = ROOT / "docs" / "memory.md"


def test_cases_are_sound_experiments(tmp_path: Path) -> None:
    options = bench.argparse.Namespace(
        shape="tiny-qwen3", layers=2, experts=None, prompts=4, lengths=[24, 16], micro_batch=4, steps=3
    )  # fmt: skip
    file = bench.random_run.write_experiment(tmp_path, options)
    loaded = {
        case: load_experiment(file, [*bench.settings(case, "tiny-qwen3"), f"trainer.run_dir={case}"])
        for case in bench.CASES
    }
    assert loaded["plain"].trainer.total_steps == 3 and not loaded["plain"].model.lora.is_used
    assert loaded["lora-no-critic-recompute-offload"].model.lora.rank == 32
    assert loaded["lora-no-critic-recompute-offload"].actor.offload.optimizer
    assert loaded["recompute-offload"].model.recompute_granularity == "full"
    for case, grads, params, reference in (
        ("offload-grads", True, False, False), ("offload-params", False, True, False),
        ("offload-ref", False, False, True),
    ):  # fmt: skip
        config = loaded[case]
        for role in (config.actor.offload, config.critic.offload):
            assert (role.grads, role.params, role.optimizer) == (grads, params, False)
        assert config.ref.offload.params == reference
    for case, is_aware, is_fp32 in (
        ("plain", False, True), ("bf16-grads", False, False), ("bf16-moments", True, True),
        ("bf16-moments-grads", True, False),
    ):  # fmt: skip
        for optim in (loaded[case].actor.optim, loaded[case].critic.optim):
            assert (optim.use_precision_aware_optimizer, optim.grad_reduce_in_fp32) == (is_aware, is_fp32)
            assert {optim.exp_avg_dtype, optim.exp_avg_sq_dtype} == {"bfloat16" if is_aware else "float32"}
            assert optim.main_grads_dtype == ("bfloat16" if is_aware and not is_fp32 else "float32")
    for case, config in loaded.items():
        found = [problem for problem in check_experiment(config, 1) if problem.severity is Severity.ERROR]
        assert not found, (case, found)
    assert loaded["selective"].model.recompute_modules == ("core_attn", "mlp")
    assert bench.settings("selective", "qwen3-30b-a3b")[1] == "model.recompute_modules=[core_attn,moe]"
    assert len({config.model_dump_json() for config in loaded.values()}) == len(bench.CASES)


@pytest.mark.parametrize(
    ("code", "log", "expected"),
    [
        (0, "", {"step": 2, "time/step": 1.0}),
        (1, "torch.OutOfMemoryError: out", "does not fit"),
        (1, "Traceback: broken", "failed"),
        (None, "torch.OutOfMemoryError: out", "cut off"),
    ],
)
def test_what_a_case_ends_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None, log: str, expected: object
) -> None:
    run_dir = tmp_path / "case"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "time/step": 1.0}\n')

    def run(command: list[str], seconds: float, output: IO[bytes]) -> int | None:
        assert command[-1] == f"trainer.run_dir={run_dir}" and seconds == 9
        output.write(log.encode())
        return code

    monkeypatch.setattr(bench.limited, "run", run)
    assert bench.measure(tmp_path / "file.yaml", run_dir, [], 9) == expected


def test_rows() -> None:
    """As docs/memory.md has them: peaks by phase, host, then seconds and the whole run."""
    gib = 2.0**30
    peaks = {f"memory/{phase}/peak": place * gib for place, phase in enumerate(bench.PHASES)}
    row = peaks | {"perf/peak_memory_bytes": 5.5 * gib, "memory/rollout/host": gib, "memory/values/host": 2 * gib}
    plain, big = bench.row("plain", row | {"time/step": 1.25}), bench.row("big", "does not fit")
    assert plain == "| plain | 0 | 1.0 | 2.0 | 3.0 | 4.0 | 5.0 | 2.0 | 1.2 | 5.5 |"
    assert big.startswith("| big | does not fit |") and big.count("|") == plain.count("|")
    no_critic = {
        name: value for name, value in row.items() if not name.startswith(("memory/values", "memory/update_c"))
    }
    assert bench.row("a", no_critic | {"time/step": 3.0}) == "| a | 0 | 1.0 | 2.0 |  |  | 5.0 | 1.0 | 3.0 | 5.5 |"
    header = next(line for line in PAGE.read_text().splitlines() if line.startswith("| shape, case |"))
    assert "| shape, case | " + " | ".join(bench.COLUMNS[:7]) + " |" == header


def test_smaller_states_are_left_out_without_transformer_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []

    def measure(file: Path, run_dir: Path, words: list[str], seconds: float | None) -> str:
        ran.append(run_dir.name)
        return "does not fit"

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench.limited, "end_on_sigterm", lambda: None)
    words = ["--shape", "tiny-qwen3", "--prompts", "2", "--out", str(tmp_path), "--cases", "bf16-grads", "bf16-moments"]
    for is_installed in (False, True):
        monkeypatch.setattr(bench, "find_spec", lambda name, found=is_installed: name if found else None)
        assert bench.main(words) == 0
    assert ran == ["bf16-grads", "bf16-grads", "bf16-moments"]
    told = capsys.readouterr().out
    assert "| tiny-qwen3, bf16-grads | does not fit |" in told
    assert told.count("| bf16-moments | needs Transformer Engine, which is not installed |") == 1
