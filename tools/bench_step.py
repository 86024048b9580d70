"""Times whole PPO steps on several layouts in one go, and prints each phase with its ratio to the first layout.

    python tools/bench_step.py [--file yaml/demo_cpu.yaml] [--layouts tp=1 tp=2 pp=2 dp=2] [--steps 6] [a.b=c …]
    python tools/bench_step.py --shape qwen2.5-1.5b --layouts tp=1 tp=2 dp=2

Every layout runs the same experiment, of a file or with random weights of a published shape, as a run of its own; the
mean is taken from the second step on. Machines are noisy: compare the ratios of one run, not seconds of different ones.
The demo's file needs `make demo` to have run.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import random_run  # beside this file

from megappo.models.families.published import PUBLISHED

PHASES = ("step", "rollout", "old_log_probs", "ref_log_probs", "values", "update_critic", "update_actor")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=Path("yaml/demo_cpu.yaml"), help="experiment to time")
    parser.add_argument("--shape", choices=sorted(PUBLISHED), help="instead of a file: random weights of this shape")
    random_run.add_arguments(parser)
    parser.add_argument("--layouts", nargs="+", default=["tp=1", "tp=2", "pp=2", "dp=2"], help="like tp=2,pp=2")
    parser.add_argument("--steps", type=int, default=6, help="steps of each layout, the first of them not counted")
    parser.add_argument("--each-step", action="store_true", help="also what each step took and held")
    parser.add_argument("overrides", nargs="*", help="a.b=c, given to every run")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps: 1 leaves no step to count; give 2 or more")
    table: dict[str, dict[str, float]] = {}
    steps: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.shape is not None:
            options.file = random_run.write_experiment(Path(folder), options)
        for layout in options.layouts:
            print(f"timing {layout} …", file=sys.stderr, flush=True)
            steps[layout] = run_layout(options, layout, Path(folder) / layout)
            table[layout] = means(steps[layout])
    print_table(table)
    if options.each_step:
        print_steps(steps)
    return 0


def run_layout(options: argparse.Namespace, layout: str, run_dir: Path) -> list[dict[str, float]]:
    """The metrics of each step."""
    sizes = {"tp": "1", "pp": "1", "dp": "1"} | dict(part.split("=") for part in layout.split(","))
    words = [f"trainer.run_dir={run_dir}", *(f"layout.{name}={size}" for name, size in sizes.items())]
    words += [f"trainer.total_steps={options.steps}", "trainer.save_last=false", "trainer.test_freq=0"]
    words += ["data.val_files=[]", "observe.tensorboard=false", "observe.samples_freq=0", *options.overrides]
    command = [sys.executable, "-m", "megappo", "train", str(options.file), *words]
    if options.shape is not None:
        # Experts are spread over the ranks that are there: they need no more of them.
        ranks = math.prod(int(sizes.get(name, "1")) for name in ("tp", "pp", "dp", "cp"))
        command = random_run.command(options.file, ranks, words)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr[-6000:]}")
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def means(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean seconds of each phase, and tokens a second and rank, of the steps after the first."""
    counted = [step for step in steps if step["step"] > 1]
    names = [f"time/{phase}" for phase in PHASES if f"time/{phase}" in counted[0]] + ["perf/tokens_per_second_per_gpu"]
    return {name: sum(step[name] for step in counted) / len(counted) for name in names}


def print_table(table: dict[str, dict[str, float]]) -> None:
    """One row a figure, one column a layout: the mean, and its ratio to the first column."""
    layouts = list(table)
    width = max(18, *(len(layout) + 2 for layout in layouts))
    print(f"{'':<32}" + "".join(f"{layout:>{width}}" for layout in layouts))
    for name, first in table[layouts[0]].items():
        figures = [table[layout][name] for layout in layouts]
        cells = [f"{mean:.3g} ({mean / first:.2f})" if first else "-" for mean in figures]
        print(f"{name:<32}" + "".join(f"{cell:>{width}}" for cell in cells))


def print_steps(steps: dict[str, list[dict[str, float]]]) -> None:
    """Seconds of each step of each layout, and what the engine held at each point of its turn, GiB."""
    for layout, lines in steps.items():
        names = [*sorted(name for name in lines[0] if name.startswith("hybrid/held")), "perf/peak_memory_bytes"]
        print(f"\n{layout}\n{'':<8}{'time/step':>12}" + "".join(f"{name:>30}" for name in names))
        for line in lines:
            held = [f"{line[name] / 2**30:.3f}" for name in names]
            print(f"step {int(line['step']):<3}{line['time/step']:>12.2f}" + "".join(f"{cell:>30}" for cell in held))


if __name__ == "__main__":
    sys.exit(main())
