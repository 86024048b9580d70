"""The memory benchmark: its cases are settings that hold, and what its table shows."""

from pathlib import Path
from typing import IO

import pytest

from megappo.config.load import load_experiment
from tests.support.tools import load_tool

bench = load_tool("bench_memory")


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
    gib = 2.0**30
    peaks = {f"memory/{phase}/peak": place * gib for place, phase in enumerate(bench.PHASES)}
    row = peaks | {"perf/peak_memory_bytes": 5.5 * gib, "memory/rollout/host": gib, "memory/values/host": 2 * gib}
    plain, big = bench.row("plain", row | {"time/step": 1.25}), bench.row("big", "does not fit")
    assert plain == "| plain | 0.00 | 1.00 | 2.00 | 3.00 | 4.00 | 5.00 | 5.50 | 2.00 | 1.2 |"
    assert big.startswith("| big | does not fit |") and big.count("|") == plain.count("|")
