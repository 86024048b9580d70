"""Trains the demo task with several algorithms and seeds on one rank, and draws their learning curves.

    python tools/learning_curves.py [--only grpo 'kl k3'] [--seeds 0 1 2] [--minutes 30] [--report] [a.b=c …]
    python tools/learning_curves.py --only 'beta too small' 'beta too large' --steps 200   # the adaptive controller

Can be made in pieces: a finished run is kept, an interrupted one goes on from its checkpoint, and `--minutes` starts
no new run after that time. Each call ends with the table of what is there (OUT/table.md) and, where matplotlib is
installed (`pip install 'megappo[plots]'`), the figure. Needs the demo's assets and warm start: `make demo` makes them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "yaml" / "demo_cpu.yaml"
LAST_STEPS = 20
"""The KL of a run and its coefficient β are means over so many of its last steps."""
EXACT_MATCH = "eval/val/exact_match"


def in_loss(kind: str) -> list[str]:
    return [f"actor.kl_loss_type={kind}", "actor.kl_loss_coef=0.02"]


def in_reward(kind: str, kl_coef: float = 0.02) -> list[str]:
    settings = f"{{type: {kind}, kl_coef: {kl_coef}, target_kl: 0.1, horizon: 1000}}"
    return ["actor.use_kl_loss=false", "algorithm.use_kl_in_reward=true", f"algorithm.kl_ctrl={settings}"]


def without_critic(estimator: str) -> list[str]:
    return [f"algorithm.adv_estimator={estimator}", *in_loss("k3")]


VARIANTS: dict[str, list[str]] = {
    "kl k1": in_loss("k1"),
    "kl k2": in_loss("k2"),
    "kl k3": in_loss("k3"),
    "kl k3+": in_loss("k3+"),
    "kl full": in_loss("full"),
    "reward kl fixed": in_reward("fixed"),
    "reward kl adaptive": in_reward("adaptive"),
    "grpo": without_critic("grpo"),
    "rloo": without_critic("rloo"),
    "reinforce++": without_critic("reinforce_plus_plus"),
}
"""Name → overrides of the demo. Names that start with `kl` or `reward kl` are PPO with a critic, KL there."""
SMALL_STEPS = ["data.train_batch_size=64", "actor.optim.lr=5e-5", "actor.optim.lr_scheduler_type=constant"]
CONTROLLER: dict[str, list[str]] = {
    "beta too small": [*in_reward("adaptive", kl_coef=0.028), *SMALL_STEPS],
    "beta too large": [*in_reward("adaptive", kl_coef=2.8), *SMALL_STEPS],
}
"""Run on demand: an adaptive KL in steps of 256 sequences, from coefficients ten times off what it comes to, 0.28."""


@dataclass
class Curve:
    """One run: exact match of held-out prompts by step, and the KL to the start of each step."""

    exact_match: dict[int, float] = field(default_factory=dict)
    kl: dict[int, float] = field(default_factory=dict)
    coefficient: dict[int, float] = field(default_factory=dict)
    """β of a KL in the reward; empty where it is elsewhere."""

    @property
    def final_kl(self) -> float:
        return at_the_end(self.kl)


def at_the_end(by_step: Mapping[int, float]) -> float:
    return statistics.fmean(list(by_step.values())[-LAST_STEPS:])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[*VARIANTS, *CONTROLLER], default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=60, help="steps of each run; another number is another folder")
    parser.add_argument("--minutes", type=float, help="start no run after this time")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "learning-curves")
    parser.add_argument("--report", action="store_true", help="run nothing: table and figure of what is there")
    parser.add_argument("overrides", nargs="*", help="a.b=c, given to every run")
    options = parser.parse_args(arguments)
    folder = options.out / f"{options.steps}-steps"
    if not options.report:
        begin = time.monotonic()
        for seed in options.seeds:
            for name in options.only:
                if options.minutes is not None and time.monotonic() - begin > 60 * options.minutes:
                    break
                train(name, seed, options.steps, folder, options.overrides)
    curves = read_curves(folder, options.steps)
    if not curves:
        print(f"{folder} holds no finished run", file=sys.stderr)
        return 1
    table = table_text(curves)
    (folder / "table.md").write_text(table)
    print(table)
    draw(curves, folder / "learning-curves.svg")
    return 0


def run_folder(folder: Path, name: str, seed: int) -> Path:
    return folder / name.replace(" ", "-") / f"seed-{seed}"


def train(name: str, seed: int, steps: int, folder: Path, overrides: Sequence[str]) -> None:
    """Runs one variant to its end, from where it was left; does nothing where it has ended."""
    run_dir = run_folder(folder, name, seed)
    if is_finished(run_dir, steps):
        return
    command = [sys.executable, "-m", "megappo", "train", str(FILE), "layout.tp=1", f"trainer.run_dir={run_dir}"]
    command += [f"trainer.seed={seed}", f"data.seed={seed}", f"trainer.total_steps={steps}", "trainer.resume=auto"]
    command += [f"trainer.test_freq={max(steps // 6, 1)}", "trainer.save_freq=20", "trainer.save_last=false"]
    command += ["trainer.max_checkpoints=1", "observe.tensorboard=false", "observe.samples_freq=0"]
    print(f"{name}, seed {seed} …", file=sys.stderr, flush=True)
    result = subprocess.run(
        [*command, *(VARIANTS | CONTROLLER)[name], *overrides], cwd=ROOT, capture_output=True, text=True
    )
    if result.returncode:
        raise SystemExit(f"{name}, seed {seed} ended with {result.returncode}:\n{result.stderr[-2000:]}")


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The steps of a run so far; a step that a resumed run repeated counts once, as it was last."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return list({line["step"]: line for line in map(json.loads, lines)}.values())


def is_finished(run_dir: Path, steps: int) -> bool:
    return any(line["step"] == steps and EXACT_MATCH in line for line in read_metrics(run_dir))


def read_curves(folder: Path, steps: int) -> dict[str, list[Curve]]:
    """The finished runs of each variant."""
    curves: dict[str, list[Curve]] = {}
    for name in [*VARIANTS, *CONTROLLER]:
        for run_dir in sorted(run_folder(folder, name, 0).parent.glob("seed-*")):
            if not is_finished(run_dir, steps):
                continue
            curve = Curve()
            for line in read_metrics(run_dir):
                if EXACT_MATCH in line:
                    curve.exact_match[line["step"]] = line[EXACT_MATCH]
                if "kl/mean" in line:
                    curve.kl[line["step"]] = line["kl/mean"]
                if "kl/reward_coef" in line:
                    curve.coefficient[line["step"]] = line["kl/reward_coef"]
            curves.setdefault(name, []).append(curve)
    return curves


def table_text(curves: Mapping[str, Sequence[Curve]]) -> str:
    """Mean over seeds, and the smallest and largest."""
    lines = [
        "| variant | seeds | exact match before | after | KL at the end | β, first and at the end |",
        "|" + "---|" * 6,
    ]
    for name, runs in curves.items():
        before = spread([run.exact_match[min(run.exact_match)] for run in runs], "{:.3f}")
        after = spread([run.exact_match[max(run.exact_match)] for run in runs], "{:.3f}")
        kl, beta = spread([run.final_kl for run in runs], "{:.3f}"), "-"
        if all(run.coefficient for run in runs):
            first = spread([next(iter(run.coefficient.values())) for run in runs], "{:.3f}")
            beta = f"{first}; {spread([at_the_end(run.coefficient) for run in runs], '{:.3f}')}"
        lines.append(f"| {name} | {len(runs)} | {before} | {after} | {kl} | {beta} |")
    return "\n".join(lines) + "\n"


def spread(numbers: Sequence[float], form: str) -> str:
    mean, low, high = (form.format(number) for number in (statistics.fmean(numbers), min(numbers), max(numbers)))
    return mean if low == high else f"{mean} ({low} to {high})"


def draw(curves: Mapping[str, Sequence[Curve]], file: Path) -> None:
    """Exact match and KL by step: the mean over seeds, and from the smallest to the largest in a lighter tone."""
    try:
        import matplotlib
    except ImportError:
        print("no figure: matplotlib is not installed; pip install 'megappo[plots]'", file=sys.stderr)
        return
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for axis, title, key in zip(
        axes, ("exact match, held out", "KL to the start, nats a token"), ("exact_match", "kl"), strict=True
    ):
        for name, runs in curves.items():
            series = [getattr(run, key) for run in runs]
            steps = sorted(set.intersection(*(set(one) for one in series)))
            values = [[one[step] for one in series] for step in steps]
            (line,) = axis.plot(steps, [statistics.fmean(row) for row in values], label=name, linewidth=1.4)
            axis.fill_between(steps, list(map(min, values)), list(map(max, values)), alpha=0.12, color=line.get_color())
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=8, ncols=2)
    figure.savefig(file, metadata={"Date": None})
    print(f"figure: {file}")


if __name__ == "__main__":
    sys.exit(main())
