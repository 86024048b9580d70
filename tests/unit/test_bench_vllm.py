"""The benchmark of vLLM, without a GPU: what makes it fail, and in which words."""

import math
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megappo.config.grid import GenerationGrid, TrainingGrid
from megappo.engines.hybrid.kinds import Kinds
from megappo.engines.hybrid.plan import Planner
from megappo.engines.rollout import Completion, Replicas, SyncReport
from megappo.engines.vllm.direct import DirectTransfer
from megappo.engines.vllm.targets import VLLMTargets
from megappo.models.families import FAMILIES
from megappo.models.families.published import PUBLISHED
from tests.support.tools import load_tool

bench = load_tool("bench_vllm")
VOCABULARY = 4000


class Uniform(nn.Module):
    """A model to which every token is as probable as any other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, ids: Tensor, positions: Tensor, mask: None) -> Tensor:
        return torch.zeros(*ids.shape, VOCABULARY)


def engine_saying(log_prob: float) -> Any:
    def generate(requests: list[Any], sampling: Any) -> list[Completion]:
        return [Completion((5, 6), (log_prob, log_prob), "", "length") for _ in requests]

    return SimpleNamespace(generate=generate)


SPEC: Any = SimpleNamespace(shape=SimpleNamespace(vocab_size=VOCABULARY, latent=None))


@pytest.mark.parametrize(
    ("off", "problems"),
    [
        (0.09, []),
        (0.11, ["log-probs as built are on average 0.1100 nats off training's; at most 0.1"]),
        (math.nan, ["log-probs as built are on average nan nats off training's; at most 0.1"]),
    ],
)
def test_log_probs_that_are_off_are_a_problem(off: float, problems: list[str]) -> None:
    engine = engine_saying(-math.log(VOCABULARY) + off)
    assert bench.compare_log_probs("as built", engine, Uniform(), SPEC, 0.1) == problems


def direct_engine() -> tuple[Any, int]:
    """An engine with the plan of one rank for a small model, and the bytes of its parameters."""
    config = PUBLISHED["tiny-qwen3"]
    family = FAMILIES[config["model_type"]]
    shape = family.shape(config)
    kinds = Kinds.of(family.weight_map(shape, "lm"))
    training = TrainingGrid()
    transfer = object.__new__(DirectTransfer)
    transfer.planner = Planner(
        kinds, training, VLLMTargets(kinds, shape, GenerationGrid(training, 1), expert_parallel=False),
        layers_of_stages=[4], element_bytes=2, bucket_bytes=1 << 20, generation_tp=1,
    )  # fmt: skip
    # By hand: an embedding of 1000 rows, padded to 1024, that is the head too; in each of 4 layers 8 + 4 + 4 heads of
    # 32 rows, the output's 8 · 32 columns, three matrices of 256, two norms, and those of q and k; the last norm.
    layer = (16 * 32 + 8 * 32 + 3 * 256) * 128 + 2 * 128 + 2 * 32
    return SimpleNamespace(_transfer=transfer, replicas=Replicas(((0,),))), 2 * (1024 * 128 + 4 * layer + 128)


def report(aliased: int, copied: int, received: int = 0, sent: int = 0) -> SyncReport:
    return SyncReport(aliased, copied, sent, seconds=1.0, bytes_received=received)


def test_bytes_that_are_not_the_formulas_are_a_problem() -> None:
    engine, weights = direct_engine()
    assert bench.byte_problems(report(weights - 100, 100), engine, SPEC, weights) == []
    (missing,) = bench.byte_problems(report(weights - 100, 98), engine, SPEC, weights)
    assert missing == (
        f"the engine has {weights - 2:,} bytes of weights ({weights - 100:,} aliased, 98 copied, 0 received); by "
        f"formula {weights:,}"
    )
    (moved,) = bench.byte_problems(report(weights - 8, 0, received=8, sent=8), engine, SPEC, weights)
    assert moved == "8 bytes were received and 8 sent; by formula 0"


def test_a_loader_on_one_rank_receives_nothing() -> None:
    engine: Any = SimpleNamespace(_transfer=object())
    assert bench.byte_problems(report(0, 50), engine, SPEC, 100) == []
    assert bench.byte_problems(report(0, 50, sent=3), engine, SPEC, 100) == [
        "0 bytes were received and 3 sent; by formula 0"
    ]


def test_problems_end_it_with_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found: list[str] = []
    monkeypatch.setattr(bench, "bench", lambda options, folder: list(found))
    assert bench.main(["--shape", "tiny-qwen3"]) == 0
    found.append("log-probs are off")
    assert bench.main(["--shape", "tiny-qwen3"]) == 1
    assert capsys.readouterr().err == "bench_vllm.py: WRONG: log-probs are off\n"


def test_a_bench_collects_what_is_wrong_at_every_point(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One switch as built and one after the update, each compared by bytes and log-probs; fp8 by its own limit."""
    limits: list[float] = []
    engine = SimpleNamespace(sync_weights=lambda: report(1, 1), release=lambda: None, close=lambda: None, replicas=None)
    replaced: dict[str, Any] = {
        "start_mesh": lambda *rest, **also: None, "read_model": lambda folder: SPEC_OF_LAYERS,
        "random_model": lambda *rest: Uniform(), "VLLMRolloutEngine": lambda *rest, **also: engine,
        "time_turns": lambda *rest: ["turn 80 ms"], "time_stream": lambda *rest: None, "used_bytes": lambda: 0,
        "byte_problems": lambda *rest: ["bytes"], "compare_speed": lambda *rest: "ratio 1.01",
        "compare_log_probs": lambda when, engine, model, spec, limit: limits.append(limit) or [when],
    }  # fmt: skip
    for name, value in replaced.items():
        monkeypatch.setattr(bench, name, value)
    options = {
        "shape": "tiny-qwen3", "dtype": "bfloat16", "utilization": 0.3, "eager": True, "quantization": "fp8",
        "cycles": 1, "no_stock": False,
    }  # fmt: skip
    import argparse

    found = bench.bench(argparse.Namespace(**options), tmp_path)
    assert found == ["bytes", "as built", "bytes", "after an update in place"]
    assert limits == [0.5, 0.5]
    assert capsys.readouterr().out.splitlines()[-1] == "summary: tiny-qwen3, turn 80 ms, ratio 1.01"


@pytest.mark.parametrize(("rounds", "seconds", "measured"), [(7, None, 7), (7, 1000.0, 7), (90, 0.0, 5), (3, 0.0, 3)])
def test_sides_take_turns_until_the_time_is_over(
    rounds: int, seconds: float | None, measured: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each side generates once after itself and once after the other in a round; here the former is twice as fast, and
    the other side half as fast. Five rounds are measured even where no time is left."""
    asked: list[str] = []

    def side(name: str, speed: float) -> Callable[[], float]:
        def rate() -> float:
            asked.append(name)
            return speed * (2 if asked[-2:] == [name, name] else 1)

        return rate

    sides = {"megappo": side("megappo", 300), "stock": side("stock", 150)}
    end = None if seconds is None else time.perf_counter() + seconds
    found = bench.take_turns(sides, rounds, end)
    assert asked[:6] == ["stock", "megappo", "megappo", "stock", "stock", "megappo"] and len(asked) == 2 + 4 * measured
    # As many tokens twice, at 300 and 600, are 400 tokens a second.
    assert found == {"megappo": [400] * measured, "stock": [200] * measured}
    lines = [re.sub(" +", " ", line) for line in capsys.readouterr().out.splitlines()]
    assert lines[1] == "round 2, tokens/s megappo 400 (600, 300), stock 200 (150, 300)" and len(lines) == measured + 1
    assert lines[-1] == "again, as a multiple of after the other megappo 2.00, stock 2.00"


SPEC_OF_LAYERS: Any = SimpleNamespace(shape=SimpleNamespace(num_layers=4, vocab_size=VOCABULARY, latent=None))


def test_ratios_of_rounds() -> None:
    ours, theirs = [100.0, 110.0, 90.0, 120.0, 80.0], [100.0, 100.0, 100.0, 100.0, 160.0]
    # By hand: ratios 1.0, 1.1, 0.9, 1.2, 0.5; of five rounds the interval is the whole range.
    assert bench.ratios(ours, theirs) == (
        "of medians 1.000, of the fastest rounds 0.750, of each round: median 1.000 (0.500 to 1.200), quartiles 0.700 "
        "to 1.150, 5 rounds"
    )


def test_the_interval_of_a_median() -> None:
    """The sign test's places: tables have 8 and 18 for 25 values, 6 and 15 for 20, 2 and 9 for 10, 1 and 6 for 6."""
    for count, low, high in ((25, 8, 18), (20, 6, 15), (10, 2, 9), (6, 1, 6), (5, 1, 5), (1, 1, 1)):
        values = [float(place) for place in range(count, 0, -1)]
        assert bench.interval_of_median(values) == (low, high), count
    draw, missed = random.Random(0), 0
    for _ in range(2000):
        low, high = bench.interval_of_median([draw.lognormvariate(0, 1) for _ in range(15)])
        missed += not low <= 1 <= high  # a log-normal's median is 1
    assert 0.02 <= missed / 2000 <= 0.05  # 0.035 of 15 values
