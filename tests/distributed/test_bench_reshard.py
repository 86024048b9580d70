"""tools/bench_reshard.py on two gloo ranks: bytes worked out by hand, bytes that are wrong, cases that fail."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import ROOT, rank_environment, run_ranks
from tests.support.tiny_models import tiny_model

# tiny-llama, float32: H 128, F 256, 8 heads of 32 and 4 KV heads; 1,024 rows of vocabulary, twice.
DENSE = 2 * (512 * 128 + 128 * 256 + 3 * 128 * 256) * 4
VOCABULARY = 2 * 1024 * 128 * 4
NORMS = (2 * 2 + 1) * 128 * 4
QKV = 2 * 512 * 128 * 4
WORDS = ["--shape", "tiny-llama", "--layers", "2", "--repeats", "1"]
TABLE = ("received", "formula", "naive", "peak", "peak by formula", "redundant", "redundant by formula", "copied")


def run(*words: str, breaks: str | None = None) -> dict[str, Any]:
    return {"arguments": [*WORDS, *words], "breaks": breaks}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    runs = [
        run("1-2-1:2,1", "2-1-1:2"),
        run("1-2-1:2,1", "--engine", "vllm"),
        run("1-2-1:2", "--engine", "vllm", breaks="aliases"),
        run("1-2-1:1", "--engine", "vllm", breaks="received"),
    ]
    results: list[dict[str, Any]] = run_ranks("tests.distributed.programs.bench_reshard", json.dumps(runs), nproc=2)
    return results


def rows(printed: str) -> list[dict[str, dict[str, float]]]:
    """Of each case: class → column → bytes of both ranks."""
    tables: list[dict[str, dict[str, float]]] = []
    for line in printed.splitlines():
        name, *figures = line.split()[:9] or [""]
        if name == "class":
            tables.append({})
        elif name in ("dense", "vocabulary", "replicated"):
            values = [float(figure.replace(",", "")) for figure in figures]
            tables[-1][name] = dict(zip(TABLE, values, strict=True))
    return tables


def test_measured_bytes_by_hand(found: list[dict[str, Any]]) -> None:
    """tp 2 → 2 has all; tp 2 → 1 lacks the other half; pp 2 → 2 lacks half of the other layer and of the other matrix,
    and trains half of its own in vain."""
    assert [(each["case"], each["is_right"]) for each in found[0]["results"]] == [
        ("1-2-1:2", True), ("1-2-1:1", True), ("2-1-1:2", True)
    ]  # fmt: skip
    same, halves, stages = rows(found[0]["printed"])
    for name, size in (("dense", DENSE), ("vocabulary", VOCABULARY)):
        assert (same[name]["received"], same[name]["peak"], same[name]["redundant"]) == (0, size, 0)
        assert (halves[name]["received"], halves[name]["peak"], halves[name]["redundant"]) == (size, 2 * size, 0)
        received, peak, redundant = (stages[name][column] for column in ("received", "peak", "redundant"))
        assert (received, peak, redundant) == (size / 2, 1.5 * size, size / 2)
    assert (halves["replicated"]["received"], halves["replicated"]["peak"]) == (0, 2 * NORMS)
    assert (stages["replicated"]["received"], stages["replicated"]["peak"]) == (NORMS, 2 * NORMS)
    for table in (same, halves, stages):
        for held in table.values():
            assert held["peak"] == held["peak by formula"] and held["redundant"] == held["redundant by formula"]
            assert held["copied"] == 0
    # Half of everything waits packed, on its way in and on its way out: each is staged, once.
    moved = (DENSE + VOCABULARY) // 2
    extra = [line for line in found[0]["printed"].splitlines() if line.startswith("switch ")][1]
    assert moved <= int(extra.partition("extra memory ")[2].split()[0].replace(",", "")) <= 2 * moved


def test_copies_of_vllms_tensors_by_hand(found: list[dict[str, Any]]) -> None:
    """q, k and v of ranks with several KV heads are copied, the rest is the training shards' memory."""
    assert all(each["is_right"] for each in found[1]["results"])
    same, halves = rows(found[1]["printed"])
    assert same["dense"]["copied"] == QKV and same["dense"]["peak"] == DENSE + QKV
    assert (same["vocabulary"]["copied"], same["vocabulary"]["redundant"]) == (0, 0)
    # Half of each whole tensor is received, and the other half has to be copied beside it.
    assert halves["dense"]["received"] == halves["dense"]["copied"] == DENSE


def test_wrong_bytes_are_told(found: list[dict[str, Any]]) -> None:
    (aliases,), (received,) = found[2]["results"], found[3]["results"]
    assert not aliases["is_right"] and aliases["wrong"] == [
        f"dense peak {2 * DENSE:,} for {DENSE + QKV:,}",
        f"dense copied {DENSE:,} for {QKV:,}",
        f"vocabulary peak {2 * VOCABULARY:,} for {VOCABULARY:,}",
        f"vocabulary copied {VOCABULARY:,} for 0",
        f"replicated peak {4 * NORMS:,} for {2 * NORMS:,}",
        f"replicated copied {2 * NORMS:,} for 0",
    ]
    assert not received["is_right"]
    assert received["wrong"][0] == f"vocabulary received {VOCABULARY + 512:,} for {VOCABULARY:,}"
    assert "NOT by formula: vocabulary received" in found[3]["printed"]


@pytest.mark.slow
def test_the_program_goes_on_after_a_case_that_fails(tmp_path: Path) -> None:
    """Three experts can't be dealt to replicas of two ranks."""
    folder = tiny_model(tmp_path / "model", "qwen3_moe", num_experts=3, num_layers=2)
    ended = subprocess.run(
        [sys.executable, "tools/bench_reshard.py", "--shape", folder, "--repeats", "1", "1-1-2:1,2", "1-2-1:1"],
        cwd=ROOT, env=rank_environment(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    told = [line for line in ended.stdout.splitlines() if line.startswith("summary: ")]
    assert ended.returncode == 1, ended.stderr
    assert len(told) == 3 and told[0].startswith("summary: 1-1-2 → 1: 0 B received, by formula;")
    assert told[1] == "summary: 1-1-2:2: failed, the ranks ended with exit code 1"
    assert told[2].startswith("summary: 1-2-1 → 1: ") and "received, by formula;" in told[2]
    assert "3 experts do not divide over 2 generation ranks" in ended.stderr
