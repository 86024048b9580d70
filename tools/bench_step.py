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
    parser.add_argument("overrides", nargs="*", help="a.b=c, given to every run")
    options = parser.parse_args(arguments)
    if options.steps < 2:
        parser.error("--steps: 1 leaves no step to count; give 2 or more")
    table: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.shape is not None:
            options.file = random_run.write_experiment(Path(folder), options)
        for layout in options.layouts:
            print(f"timing {layout} …", file=sys.stderr, flush=True)
            table[layout] = time_layout(options, layout, Path(folder) / layout)
    print_table(table)
    return 0


def time_layout(options: argparse.Namespace, layout: str, run_dir: Path) -> dict[str, float]:
    """Mean seconds of each phase, and tokens a second and rank, of one layout's steps after the first."""
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
        raise SystemExit(f"{' '.join(command)} ended with {result.returncode}:\n{result.stderr[-2000:]}")
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    counted = [step for step in steps if step["step"] > 1]
    names = [f"time/{phase}" for phase in PHASES] + ["perf/tokens_per_second_per_gpu"]
    return {name: sum(step[name] for step in counted) / len(counted) for name in names}


def print_table(table: dict[str, dict[str, float]]) -> None:
    """One row a figure, one column a layout: the mean, and its ratio to the first column."""
    layouts = list(table)
    print(f"{'':<32}" + "".join(f"{layout:>18}" for layout in layouts))
    for name, first in table[layouts[0]].items():
        means = [table[layout][name] for layout in layouts]
        cells = [f"{mean:.3g} ({mean / first:.2f})" if first else "-" for mean in means]
        print(f"{name:<32}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
