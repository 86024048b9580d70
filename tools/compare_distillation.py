"""Trains the demo from preferences with several seeds: DPO alone, PPO with its token rewards, PPO with their sum.

    python tools/compare_distillation.py [--seeds 0 1 2] [--minutes 30] [--report] [a.b=c …]

Each seed runs yaml/demo_distill.yaml on one rank, then its last stage again with the same reward given once, at the end
of the response. Can be made in pieces: what is finished is kept. Ends with the table of what is there (OUT/table.md):
exact match of held-out additions, which no run learns from. Needs tools/make_demo.py and tools/make_demo_pairs.py.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megappo.observe.run_folder import RunFolder
from megappo.observe.trackers import read_metrics

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "yaml" / "demo_distill.yaml"
EXACT_MATCH = "eval/val/exact_match"
STARTS, DPO, DENSE, AT_END = "supervised start", "DPO policy", "PPO, a reward each token", "PPO, their sum at the end"
COLUMNS = (STARTS, DPO, DENSE, AT_END)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, help="start no seed after this time")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "compare-distillation")
    parser.add_argument("--report", action="store_true", help="run nothing: the table of what is there")
    parser.add_argument("overrides", nargs="*", help="a.b=c, given to every run")
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    for seed in options.seeds:
        late = options.minutes is not None and time.monotonic() - begin > 60 * options.minutes
        if not (options.report or late or result(options.out / f"seed-{seed}")):
            train(options.out / f"seed-{seed}", seed, options.overrides)
    found = {seed: row for seed in options.seeds if (row := result(options.out / f"seed-{seed}"))}
    if not found:
        print(f"{options.out} holds no finished seed", file=sys.stderr)
        return 1
    table = table_text(found)
    (options.out / "table.md").write_text(table)
    print(table)
    return 0


def train(folder: Path, seed: int, overrides: Sequence[str]) -> None:
    """The chain, and its PPO with the sum of the token rewards at the end of the response."""
    common = [f"trainer.seed={seed}", f"data.seed={seed}", "layout.tp=1", "observe.tensorboard=false", *overrides]
    run([f"trainer.run_dir={folder}", *common], ["--resume"])
    start = folder / "sft" / "hf" / "latest"
    parts = [
        {
            "name": "dense", "kind": "implicit", "policy": str(folder / "dpo" / "hf" / "latest"), "beta": 0.3,
            "micro_batch_size_per_gpu": 128, "at_end": True,
        },
        {"name": "correct", "kind": "exact_match", "evaluation_only": True},
    ]  # fmt: skip
    again = [f"trainer.run_dir={folder / 'at-end'}", f"stages.ppo.model.path={start}"]
    again += [f"stages.ppo.reward.parts={json.dumps(parts)}", "trainer.resume=auto"]
    run([*again, *common], ["--stage", "ppo"])


def run(settings: Sequence[str], options: Sequence[str]) -> None:
    print(f"{settings[0]} …", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "megappo", "train", str(FILE), *options, *settings]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")


def result(folder: Path) -> dict[str, float] | None:
    """Exact match by column; None where a run is not at its end."""
    runs = {DPO: folder / "dpo", DENSE: folder / "ppo", AT_END: folder / "at-end" / "ppo"}
    if not all(RunFolder(run_dir).state == "done" for run_dir in runs.values()):
        return None
    measured = {
        name: [line[EXACT_MATCH] for line in read_metrics(run_dir / "metrics.jsonl") if EXACT_MATCH in line]
        for name, run_dir in runs.items()
    }
    return {STARTS: measured[DENSE][0]} | {name: several[-1] for name, several in measured.items()}


def table_text(found: dict[int, dict[str, float]]) -> str:
    lines = ["| seed | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (len(COLUMNS) + 1)]
    lines += [f"| {seed} | " + " | ".join(f"{row[name]:.1%}" for name in COLUMNS) + " |" for seed, row in found.items()]
    means = [statistics.fmean(row[name] for row in found.values()) for name in COLUMNS]
    lines.append("| mean | " + " | ".join(f"{mean:.1%}" for mean in means) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
