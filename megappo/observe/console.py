"""What a person sees of a run: a line a step, evaluations, and progress inside a step where there is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TextIO

from megappo.observe.metrics import Remaining

# Metrics of the step line, in order: label, name, format.
COLUMNS = (
    ("reward", "reward/score", "{:.3f}"),
    ("kl", "kl/mean", "{:.4f}"),
    ("ppo_kl", "actor/ppo_kl", "{:.1e}"),
    ("clip", "actor/pg_clipfrac", "{:.3f}"),
    ("entropy", "actor/entropy", "{:.3f}"),
    ("vf", "critic/vf_loss", "{:.3f}"),
    ("loss", "sft/loss", "{:.4f}"),
    ("loss", "reward_model/loss", "{:.4f}"),
    ("accuracy", "reward_model/accuracy", "{:.3f}"),
    ("loss", "dpo/loss", "{:.4f}"),
    ("accuracy", "dpo/accuracy", "{:.3f}"),
    ("margin", "dpo/margin", "{:.3f}"),
    ("length", "response_length/mean", "{:.1f}"),
)


class Console:
    """Prints to `stream`; without a terminal there is no progress inside a step and no control character."""

    def __init__(self, total_steps: int, stream: TextIO = sys.stdout) -> None:
        self._total_steps = total_steps
        self._stream = stream
        self._remaining = Remaining(total_steps)
        self._is_terminal = stream.isatty()
        self._phase = ""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line: number, what is learned, seconds by phase, tokens a second, time left."""
        seconds = metrics["time/step"]
        left = self._remaining.after(step, seconds)
        shown = [f"{label} {form.format(metrics[name])}" for label, name, form in COLUMNS if name in metrics]
        if "perf/tokens_per_second_per_gpu" in metrics:
            shown.append(f"{metrics['perf/tokens_per_second_per_gpu']:.0f} tokens/s/gpu")
        self._line(
            f"step {step:>{len(str(self._total_steps))}}/{self._total_steps}  " + "  ".join(shown)
            + f"  {seconds:.1f} s ({_phases(metrics)})  ETA {duration(left)}"
        )  # fmt: skip

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line a data set."""
        self.scores(f"after step {step}: ", metrics)

    def scores(self, prefix: str, metrics: Mapping[str, float]) -> None:
        """The `eval/<data set>/…` metrics, one line a data set."""
        sets: dict[str, list[str]] = {}
        for name, value in metrics.items():
            _, data_set, measure = name.split("/", 2)
            text = f"{100 * value:.1f}%" if measure in ("exact_match", "pass_at_k", "accuracy") else f"{value:.3f}"
            sets.setdefault(data_set, []).append(f"{measure} {text}")
        for data_set, shown in sets.items():
            self._line(f"{prefix}{data_set}: " + "  ".join(shown))

    def phase(self, step: int, name: str) -> None:
        """The phase that begins: shown on a terminal, overwritten by the next line."""
        self._phase = f"step {step}/{self._total_steps}: {name}"
        self._overwrite(self._phase)

    def progress(self, done: int, total: int) -> None:
        self._overwrite(f"{self._phase} {done}/{total}")

    def say(self, text: str) -> None:
        self._line(text)

    def _line(self, text: str) -> None:
        clear = "\r\x1b[K" if self._is_terminal else ""
        print(clear + text, file=self._stream, flush=True)

    def _overwrite(self, text: str) -> None:
        if self._is_terminal:
            print("\r\x1b[K" + text, end="", file=self._stream, flush=True)


def duration(seconds: float) -> str:
    """`42 s`, `3 min 20 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _phases(metrics: Mapping[str, float]) -> str:
    """The phases that take at least a tenth of the step, longest first."""
    total = metrics["time/step"]
    phases = {name.removeprefix("time/"): value for name, value in metrics.items() if name.startswith("time/")}
    del phases["step"]
    long = sorted(((value, name) for name, value in phases.items() if value >= 0.1 * total), reverse=True)
    return ", ".join(f"{name} {value:.1f}" for value, name in long)
