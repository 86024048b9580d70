"""What a person reads: the line of a step, evaluations, time left, and a terminal's progress."""

import io
import json
from pathlib import Path

import pytest

from megappo.observe.console import Console, duration

STEP = {
    "reward/score": 0.5, "actor/ppo_kl": 0.00012, "response_length/mean": 12.0,
    "perf/tokens_per_second_per_gpu": 1234.4,
    "time/rollout": 3.0, "time/update_actor": 6.0, "time/reward": 0.5, "time/step": 10.0,
}  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_step_line_names_the_long_phases_and_the_time_left() -> None:
    stream = io.StringIO()
    console = Console(120, stream)
    console.step(2, STEP)
    assert stream.getvalue() == (
        "step   2/120  reward 0.500  ppo_kl 1.2e-04  length 12.0  1234 tokens/s/gpu  "
        "10.0 s (update_actor 6.0, rollout 3.0)  ETA 19 min 40 s\n"
    )


def test_evaluation_has_a_line_for_each_data_set() -> None:
    stream = io.StringIO()
    gsm8k = {"eval/gsm8k/reward": 0.25, "eval/gsm8k/exact_match": 0.125}
    math = {"eval/math/reward": 1.0, "eval/math/pass_at_k": 1.0}
    Console(10, stream).evaluation(5, gsm8k | math)
    assert stream.getvalue() == (
        "after step 5: gsm8k: reward 0.250  exact_match 12.5%\nafter step 5: math: reward 1.000  pass_at_k 100.0%\n"
    )


def test_without_a_terminal_nothing_is_overwritten() -> None:
    stream = io.StringIO()
    console = Console(3, stream)
    console.phase(1, "rollout")
    console.progress(4, 8)
    assert stream.getvalue() == ""
    console.say("done")
    assert stream.getvalue() == "done\n"


def test_terminal_shows_progress_and_clears_it() -> None:
    stream = Terminal()
    console = Console(3, stream)
    console.phase(1, "rollout")
    console.progress(4, 8)
    console.say("done")
    shown = ["step 1/3: rollout", "step 1/3: rollout 4/8", "done\n"]
    assert stream.getvalue() == "".join("\r\x1b[K" + text for text in shown)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (200, "3 min 20 s"),
        (3599.7, "1 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_exact_match_is_told_from_first_to_last(tmp_path: Path) -> None:
    from megappo.trainer.reporter import exact_match_lines

    file = tmp_path / "metrics.jsonl"
    lines = [
        {"step": 0, "eval/gsm8k/exact_match": 0.25, "eval/b/exact_match": 0.5, "eval/gsm8k/reward": 0.0},
        {"step": 1, "reward/score": 1.0},
        {"step": 2, "eval/gsm8k/exact_match": 0.4},
        {"step": 4, "eval/gsm8k/exact_match": 0.375, "eval/b/exact_match": 0.25},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert exact_match_lines(file) == [
        "exact match on b: 50.0% at step 0, 25.0% at step 4 (-25.0 points)",
        "exact match on gsm8k: 25.0% at step 0, 37.5% at step 4 (+12.5 points)",
    ]
    file.write_text('{"step": 1, "reward/score": 1.0}\n')
    assert exact_match_lines(file) == []
