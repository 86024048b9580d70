"""What bench_reshard.py starts and goes on with, with ranks that only pretend; and the shapes that it takes."""

import itertools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from megappo.models.families.published import PUBLISHED
from tests.support.tools import load_tool

bench = load_tool("bench_reshard")
ENDS = {"1-2-1:1": "crash", "2-1-1:1": "wrong"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The words of each start of ranks, which tell the cases as right but for those of ENDS."""
    starts: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        starts.append(command)
        cases = [word for word in command if word.count(":") == 1 and word[0].isdigit() and "." not in word]
        results = Path(command[command.index("--results") + 1])
        for case in cases:
            if ENDS.get(case) == "crash":
                return subprocess.CompletedProcess(command, 1)
            with results.open("a") as file:
                file.write(json.dumps({"case": case, "is_right": case not in ENDS}) + "\n")
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(bench.subprocess, "run", run)
    return starts


def test_the_other_cases_go_on(started: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--layers", "2", "--bucket-mib", "0.5"]
    assert bench.main(["1-2-1:2,1", "1-1-4:1", "1-3-1:1", "1-1-2:1", *words]) == 1
    found = [
        (word, [each for each in start if each.count(":") == 1 and each[0].isdigit() and "." not in each])
        for start in started
        for word in start
        if word.startswith("--nproc-per-node")
    ]
    two, four = "--nproc-per-node=2", "--nproc-per-node=4"
    assert found == [(two, ["1-2-1:2", "1-2-1:1", "1-1-2:1"]), (two, ["1-1-2:1"]), (four, ["1-1-4:1"])]
    for start in started:
        asked = dict(itertools.pairwise(start))
        assert (asked["--shape"], asked["--layers"], asked["--bucket-mib"]) == ("tiny-llama", "2", "0.5")
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("summary: 1-3-1:1: not run: layout.tp: 3 does not divide this model's 8 attention heads")
    assert told[1] == "summary: 1-2-1:1: failed, the ranks ended with exit code 1"


@pytest.mark.parametrize(("case", "code"), [("1-1-2:2", 0), ("2-1-1:1", 1)])
def test_bytes_that_are_wrong_make_the_exit_code_1(started: list[list[str]], case: str, code: int) -> None:
    assert bench.main([case]) == code and len(started) == 1


def test_no_such_shape(started: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--shape", "none", "1-1-2:2"]) == 2 and not started
    assert "error: --shape: none: no such file; give a config.json, or one of tiny-llama," in capsys.readouterr().err


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_every_published_shape_and_its_config_json(name: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(dict(PUBLISHED[name])))
    spec = bench.model_shape.read_shape(name, layers=8)
    assert spec.shape.num_layers == 8 and spec.family.model_type == PUBLISHED[name]["model_type"]
    for given in (tmp_path, file):
        read = bench.model_shape.read_shape(str(given))
        assert read.shape.num_layers == PUBLISHED[name]["num_hidden_layers"]
        assert bench.model_shape.read_shape(str(given), layers=8).shape == spec.shape
