"""Runs of random weights, for benchmarks: a model folder that has a shape and no weights is trained."""

from pathlib import Path

import pytest

from tests.support.ranks import rank_environment
from tests.support.tools import load_tool

bench = load_tool("bench_memory")


def test_a_shape_without_weights_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in rank_environment().items():
        monkeypatch.setenv(name, value)
    sizes = ["--layers", "2", "--prompts", "2", "--lengths", "12", "4", "--micro-batch", "2"]
    assert bench.main(["--shape", "tiny-qwen3", *sizes, "--cases", "plain", "--out", str(tmp_path)]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells[0] == "tiny-qwen3, plain" and cells[1:7] == [""] * 6  # no peaks by phase on a CPU
    assert float(cells[8]) > 0 and float(cells[9]) > 0.1  # seconds; torch alone is larger
    assert not list((tmp_path / "model").glob("*.safetensors"))
    assert len((tmp_path / "plain" / "metrics.jsonl").read_text().splitlines()) == 2
