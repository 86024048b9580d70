"""Metrics of several runs side by side, step by step: each run's figure, and its ratio to the first run's.

    python tools/compare_runs.py RUN_DIR RUN_DIR … [--metrics reward/score …] [--every 5] [--learned reward/score]

A table for each metric, then the largest differences. Without `--metrics`: the score, its parts, and exact match of
held-out prompts. `--learned` makes the exit code 1 unless every run's metric rises from its first third of steps to its
last, the other runs' by at least half as much as the first's. Steps that a run lacks, or has no figure for, are `-`.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megappo.observe.trackers import read_metrics

LEAST_SHARE = 0.5
"""Of the first run's rise, that another run has to make."""


@dataclass(frozen=True)
class Run:
    name: str
    metrics: dict[str, dict[int, float]]
    """Metric → step → value; values that are null are left out."""

    @classmethod
    def read(cls, run_dir: Path) -> "Run":
        metrics: dict[str, dict[int, float]] = {}
        for line in read_metrics(run_dir / "metrics.jsonl"):
            for name, value in line.items():
                if isinstance(value, int | float) and name not in ("step", "wall_time"):
                    metrics.setdefault(name, {})[line["step"]] = value
        return cls(run_dir.name, metrics)

    def of(self, metric: str) -> dict[int, float]:
        return self.metrics.get(metric, {})


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="the first is what all compare with")
    parser.add_argument("--metrics", nargs="+", help="names as in metrics.jsonl")
    parser.add_argument("--every", type=int, default=1, help="show every so many steps, and the last")
    parser.add_argument("--learned", metavar="METRIC", help="fail unless it rises in all runs as in the first")
    options = parser.parse_args(arguments)
    if options.every < 1:
        parser.error(f"--every {options.every}: has to be 1 or more")
    runs = [Run.read(run_dir) for run_dir in options.run_dirs]
    for run, run_dir in zip(runs, options.run_dirs, strict=True):
        if not run.metrics:
            print(f"compare_runs: {run_dir} holds no metrics.jsonl with a step", file=sys.stderr)
            return 1
    metrics = options.metrics or default_metrics(runs[0])
    for metric in metrics:
        print(table_text(metric, runs, options.every))
    print(differences_text(metrics, runs))
    if options.learned is None:
        return 0
    verdict, learned = learned_text(options.learned, runs)
    print(f"summary: {verdict}")
    return int(not learned)


def default_metrics(run: Run) -> list[str]:
    evaluated = sorted(name for name in run.metrics if name.startswith("eval/") and name.endswith("/exact_match"))
    return ["reward/score", *sorted(name for name in run.metrics if name.startswith("reward/parts/")), *evaluated]


def table_text(metric: str, runs: Sequence[Run], every: int) -> str:
    """The steps at which any run has the metric; every so many of them, and the last."""
    steps = sorted({step for run in runs for step in run.of(metric)})
    shown = [step for place, step in enumerate(steps) if place % every == 0 or step == steps[-1]]
    lines = [f"| {metric} | " + " | ".join(run.name for run in runs) + " |", "|" + "---|" * (len(runs) + 1)]
    for step in shown:
        first = runs[0].of(metric).get(step)
        cells = [cell(run.of(metric).get(step), first if run is not runs[0] else None) for run in runs]
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def cell(value: float | None, first: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.4g} ({value / first:.2f})" if first else f"{value:.4g}"


def differences_text(metrics: Sequence[str], runs: Sequence[Run]) -> str:
    """Of each metric and run: its first and last figure, and how far it is from the first run's at the same steps."""
    lines = ["| metric | run | first | last | largest difference | at step | mean difference |", "|" + "---|" * 7]
    for metric in metrics:
        for run in runs:
            values = run.of(metric)
            ends = [f"{values[step]:.4g}" for step in (min(values), max(values))] if values else ["-", "-"]
            apart = differences(metric, run, runs[0]) if run is not runs[0] else {}
            cells = ["-"] * 3
            if apart:
                worst = max(apart, key=lambda step: abs(apart[step]))
                cells = [f"{apart[worst]:+.4g}", str(worst), f"{statistics.fmean(apart.values()):+.4g}"]
            lines.append(f"| {metric} | {run.name} | " + " | ".join([*ends, *cells]) + " |")
    return "\n".join(lines) + "\n"


def differences(metric: str, run: Run, first: Run) -> Mapping[int, float]:
    """Step → the run's figure less the first run's, where both have one."""
    ours, theirs = run.of(metric), first.of(metric)
    return {step: ours[step] - theirs[step] for step in ours if step in theirs}


def rise(values: Mapping[int, float]) -> tuple[float, float] | None:
    """The means of the first and of the last third of the steps; None for fewer than two."""
    figures = [values[step] for step in sorted(values)]
    third = max(len(figures) // 3, 1)
    return (statistics.fmean(figures[:third]), statistics.fmean(figures[-third:])) if len(figures) > 1 else None


def learned_text(metric: str, runs: Sequence[Run]) -> tuple[str, bool]:
    """What each run's metric rose from and to, and whether all learned as the first did."""
    parts, least = [], 0.0
    learned = True
    for run in runs:
        ends = rise(run.of(metric))
        if ends is None:
            parts.append(f"{run.name} has too few steps")
            learned = False
            continue
        gain = ends[1] - ends[0]
        learned &= gain > 0 and gain >= least
        if run is runs[0]:
            least = LEAST_SHARE * gain
        parts.append(f"{run.name} {ends[0]:.4g} to {ends[1]:.4g}")
        if apart := differences(metric, run, runs[0]) if run is not runs[0] else {}:
            parts[-1] += f" (largest difference of a step {max(map(abs, apart.values())):.4g})"
    return f"{metric}: {'; '.join(parts)}: {'learned' if learned else 'NOT learned alike'}", learned


if __name__ == "__main__":
    sys.exit(main())
