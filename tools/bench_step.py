"""Times whole PPO steps on several layouts in one go, and prints each phase with its ratio to the first layout.

    python tools/bench_step.py [--file yaml/demo_cpu.yaml] [--layouts tp=1 tp=2 pp=2 dp=2] [--steps 6] [a.b=c …]
    python tools/bench_step.py --shape qwen2.5-1.5b --layouts tp=1 tp=2 dp=2 [--limit 120] [--out DIR]

Every layout runs the same experiment, of a file or with random weights of a published shape, as a run of its own, and
each step is told as it ends; the mean is taken from the second step on. Machines are noisy: compare the ratios of one
run, not seconds of different ones. A layout that the experiment or the GPU's memory does not allow is told so; one that
fails or is cut off makes the exit code 1, and the others go on. The demo's file needs `make demo` to have run.
"""

import argparse
import json
import math
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import limited  # beside this file
import random_run

from megappo.config.checks import require_sound
from megappo.config.load import load_experiment
from megappo.errors import UserError
from megappo.models.families.published import PUBLISHED
from megappo.observe.trackers import read_metrics

PHASES = ("step", "rollout", "old_log_probs", "ref_log_probs", "values", "update_critic", "update_actor")
SPEED, PEAK = "perf/tokens_per_second_per_gpu", "perf/peak_memory_bytes"
NOT_ENOUGH = "OutOfMemoryError"
TOLD_CHARACTERS = 4000


@dataclass(frozen=True)
class Result:
    """The metrics of a layout's steps so far, and what kept it from its end; `failed`: the exit code is to tell it."""

    steps: list[dict[str, Any]]
    problem: str = ""
    failed: bool = False


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=Path("yaml/demo_cpu.yaml"), help="experiment to time")
    parser.add_argument("--shape", choices=sorted(PUBLISHED), help="instead of a file: random weights of this shape")
    random_run.add_arguments(parser)
    parser.add_argument("--layouts", nargs="+", default=["tp=1", "tp=2", "pp=2", "dp=2"], help="like tp=2,pp=2")
    parser.add_argument("--steps", type=int, default=6, help="steps of each layout, the first of them not counted")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="end a layout that takes longer, its start too")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep runs and logs; finished ones are not rerun")
    parser.add_argument("--metrics", nargs="+", default=[], metavar="NAME", help="also the means of these, by layout")
    parser.add_argument("--each-step", action="store_true", help="also what each step took and held")
    parser.add_argument("--flat-mib", type=float, metavar="MIB", help="fail where a step holds more than the second")
    parser.add_argument("overrides", nargs="*", help="a.b=c, given to every run")
    options = parser.parse_args(arguments)
    # argparse gives --layouts all words that follow it, overrides too: these have a dot in their name.
    options.overrides = [*options.overrides, *(word for word in options.layouts if "." in word.partition("=")[0])]
    options.layouts = [word for word in options.layouts if word not in options.overrides]
    if options.steps < 2:
        parser.error("--steps: 1 leaves no step to count; give 2 or more")
    limited.end_on_sigterm()
    results: dict[str, Result] = {}
    grows = False
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        if options.shape is not None:
            options.file = random_run.write_experiment(folder, options)
        try:
            for layout in options.layouts:
                print(f"timing {layout} …", flush=True)
                results[layout] = run_layout(options, layout, folder)
        finally:  # also where a signal ends it: what is there is told
            print_table(results)
            print_metrics(results, options.metrics)
            if options.each_step:
                print_steps(results)
            if options.flat_mib is not None:
                grows = print_growth(results, options.flat_mib)
            sys.stdout.flush()
    return int(grows or any(result.failed for result in results.values()))


def run_layout(options: argparse.Namespace, layout: str, folder: Path) -> Result:
    """Runs the layout, or reads what an earlier call left of the same run; problems are told at once, and kept."""
    run_dir = folder / layout
    words = words_of(options, layout)
    asked, record = json.dumps([options.file.read_text(), words]), folder / f"{layout}.asked.json"
    if record.exists() and record.read_text() == asked:
        steps = read_metrics(run_dir / "metrics.jsonl")
        if len(steps) == options.steps:
            print(f"{layout}: read from {run_dir}", flush=True)
            return Result(steps)
    ranks = num_ranks(layout)
    try:
        require_sound(load_experiment(options.file, [*words, f"trainer.run_dir={run_dir}"]), ranks)
    except UserError as error:
        return told(layout, Result([], f"does not fit: {error}"))
    shutil.rmtree(run_dir, ignore_errors=True)
    words = [*words, f"trainer.run_dir={run_dir}"]
    command = [sys.executable, "-m", "megappo", "train", str(options.file), *words]
    if options.shape is not None:
        # Experts are spread over the ranks that are there: they need no more of them.
        command = random_run.command(options.file, ranks, words)
    steps = Steps(layout, run_dir / "metrics.jsonl")
    with (folder / f"{layout}.log").open("wb") as log:
        code = limited.run(command, options.limit, log, meanwhile=steps.tell)
    steps.tell()
    if code == 0:
        record.write_text(asked)
        return Result(steps.lines)
    text = (folder / f"{layout}.log").read_text(errors="replace")
    if code is None:
        return told(layout, Result(steps.lines, f"cut off after {options.limit:g} s", failed=True), text)
    if NOT_ENOUGH in text:
        return told(layout, Result(steps.lines, "does not fit: the GPU's memory is not enough"))
    return told(layout, Result(steps.lines, f"failed with exit code {code}", failed=True), text)


def words_of(options: argparse.Namespace, layout: str) -> list[str]:
    """The overrides of a layout's run, but for its folder."""
    sizes = {"tp": "1", "pp": "1", "dp": "1"} | sizes_of(layout)
    words = [*(f"layout.{name}={size}" for name, size in sizes.items())]
    words += [f"trainer.total_steps={options.steps}", "trainer.save_last=false", "trainer.test_freq=0"]
    return [*words, "data.val_files=[]", "observe.tensorboard=false", "observe.samples_freq=0", *options.overrides]


def sizes_of(layout: str) -> dict[str, str]:
    return dict(part.split("=") for part in layout.split(","))


def num_ranks(layout: str) -> int:
    sizes = sizes_of(layout)
    return math.prod(int(sizes.get(name, "1")) for name in ("tp", "pp", "dp", "cp"))


class Steps:
    """The steps of a run that goes on, each of which is printed once."""

    def __init__(self, layout: str, metrics: Path) -> None:
        self.lines: list[dict[str, Any]] = []
        self._layout = layout
        self._metrics = metrics

    def tell(self) -> None:
        """Prints the steps that have come."""
        known = len(self.lines)
        self.lines = read_metrics(self._metrics)
        for line in self.lines[known:]:
            speed = f"{line[SPEED]:,.0f} tokens/s/GPU" if line.get(SPEED) is not None else "no speed"
            print(f"{self._layout}: step {line['step']}: {line['time/step']:.2f} s, {speed}", flush=True)


def told(layout: str, result: Result, log: str = "") -> Result:
    """The result, whose problem is printed with the first traceback and the end of the log."""
    start = log.find("Traceback")
    first = log[start : start + TOLD_CHARACTERS] + "\n…\n" if 0 <= start < len(log) - TOLD_CHARACTERS else ""
    print(f"{layout}: {result.problem}\n{first}{log[-TOLD_CHARACTERS:]}".rstrip(), flush=True)
    return result


def means(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of the steps after the first: mean seconds of each phase and tokens a second and rank; the peak memory in GiB."""
    counted = [step for step in steps if step["step"] > 1]
    if not counted:
        return {}
    names = [f"time/{phase}" for phase in PHASES if f"time/{phase}" in counted[0]] + [SPEED]
    mean = {name: sum(step[name] for step in counted) / len(counted) for name in names}
    return mean | {"peak GiB": max(step[PEAK] for step in counted) / 2**30}


def print_table(results: Mapping[str, Result]) -> None:
    """One row a figure, one column a layout: the mean, and its ratio to the first column; then what has no column."""
    table = {layout: figures for layout, result in results.items() if (figures := means(result.steps))}
    layouts = list(table)
    if layouts:
        width = max(18, *(len(layout) + 2 for layout in layouts))
        print(f"{'':<32}" + "".join(f"{layout:>{width}}" for layout in layouts))
        for name, first in table[layouts[0]].items():
            figures = [table[layout].get(name, math.nan) for layout in layouts]
            cells = [f"{mean:.3g} ({mean / first:.2f})" if first else "-" for mean in figures]
            print(f"{name:<32}" + "".join(f"{cell:>{width}}" for cell in cells))
    parts = [f"{layout} {table[layout][SPEED]:,.0f} tokens/s/GPU" for layout in layouts[:1]]
    parts += [f"{layout} {ratio(table, layout)}" for layout in layouts[1:]]
    parts += [f"{layout} {result.problem.splitlines()[0]}" for layout, result in results.items() if result.problem]
    print("summary: " + "; ".join(parts))


def ratio(table: Mapping[str, Mapping[str, float]], layout: str) -> str:
    """A layout's speed against that of the first one."""
    first = next(iter(table.values()))[SPEED]
    return f"{table[layout][SPEED] / first:.2f} of it" if first else "-"


def print_metrics(results: Mapping[str, Result], names: Sequence[str]) -> None:
    """One line a layout: the mean of each metric over the steps that have it."""
    for layout, result in results.items():
        values = {name: [step[name] for step in result.steps if name in step] for name in names}
        parts = [
            f"{name} {sum(each) / len(each):.4g}" if each else f"{name} in no step" for name, each in values.items()
        ]
        if parts:
            print(f"summary: {layout} {', '.join(parts)}")


def held(line: Mapping[str, float]) -> list[str]:
    """The metrics that say what the engine holds at the points of its turn."""
    return sorted(name for name in line if name.startswith("hybrid/held"))


def print_steps(results: Mapping[str, Result]) -> None:
    """Seconds of each step of each layout, and what the engine held at each point of its turn, GiB."""
    for layout, result in results.items():
        if not result.steps:
            continue
        names = [*held(result.steps[0]), PEAK]
        print(f"\n{layout}\n{'':<8}{'time/step':>12}" + "".join(f"{name:>30}" for name in names))
        for line in result.steps:
            cells = [f"{line[name] / 2**30:.3f}" for name in names]
            print(f"step {int(line['step']):<3}{line['time/step']:>12.2f}" + "".join(f"{cell:>30}" for cell in cells))


def print_growth(results: Mapping[str, Result], limit_mib: float) -> bool:
    """What later steps held more than the second at any point of the turn; whether one is over the limit, or none is
    measured."""
    over = False
    for layout, result in results.items():
        counted = [line for line in result.steps if line["step"] > 1]
        growth = {
            name: max(line[name] - counted[0][name] for line in counted) / 2**20
            for name in (held(counted[0]) if counted else [])
        }
        over |= not growth or max(growth.values()) > limit_mib
        parts = [f"{name.removeprefix('hybrid/held_')} {mib:+.1f} MiB" for name, mib in growth.items()]
        print(f"summary: {layout} over {len(result.steps)} steps: {', '.join(parts) or 'nothing measured'}")
    return over


if __name__ == "__main__":
    sys.exit(main())
