"""What PPO steps of a model hold in each phase, with each way to save memory on and off: one table.

    python tools/bench_memory.py --shape qwen2.5-1.5b [--cases plain recompute …] [--steps 2] [--out DIR] [a.b=c …]
    python tools/bench_memory.py --shape qwen2.5-7b --cases lora-no-critic lora-no-critic-offload

Random weights of a published shape, prompts of random tokens, one rank. Every case is a run of its own, and shows the
`memory/<phase>/peak` of its last step; where one does not fit, fails, or takes longer than `--limit`, the table says
so, and the others go on. Cases of smaller optimizer states need Transformer Engine, and are left out without it.
Without a GPU there is no peak by phase: then the table has the resident memory of the whole run.
The columns are those of the table in docs/memory.md, and two more.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import limited  # beside this file
import random_run

from megappo.models.families.published import PUBLISHED

PHASES = ("rollout", "old_log_probs", "ref_log_probs", "values", "update_critic", "update_actor")
COLUMNS = (*PHASES, "host", "s/step", "whole run")
RECOMPUTE = ["model.recompute_granularity=full", "model.recompute_method=uniform", "model.recompute_num_layers=1"]
OPTIMIZERS = ["actor.offload.optimizer=true", "critic.offload.optimizer=true"]
GRADS = ["actor.offload.grads=true", "critic.offload.grads=true"]
REFERENCE = ["ref.offload.params=true"]
OFFLOAD = [*OPTIMIZERS, *GRADS, "critic.offload.params=true", *REFERENCE]
LORA = ["model.lora.rank=32", "critic.lora.rank=32"]
NO_CRITIC = ["algorithm.adv_estimator=grpo"]


def of_both(*settings: str) -> list[str]:
    """Settings of the optimizers of actor and critic."""
    return [f"{role}.optim.{setting}" for role in ("actor", "critic") for setting in settings]


BF16_MOMENTS = ["use_precision_aware_optimizer=true", "exp_avg_dtype=bfloat16", "exp_avg_sq_dtype=bfloat16"]
BF16_GRADS = ["grad_reduce_in_fp32=false"]
CASES: dict[str, list[str]] = {
    "plain": [],
    "selective": ["model.recompute_granularity=selective", "model.recompute_modules=[core_attn,{mlp}]"],
    "recompute": RECOMPUTE,
    "offload-optimizer": OPTIMIZERS,
    "offload": OFFLOAD,
    "recompute-offload": [*RECOMPUTE, *OFFLOAD],
    "offload-grads": GRADS,
    "offload-params": ["actor.offload.params=true", "critic.offload.params=true"],
    "offload-ref": REFERENCE,
    "bf16-grads": of_both(*BF16_GRADS),
    "bf16-moments": of_both(*BF16_MOMENTS),
    "bf16-moments-grads": of_both(*BF16_MOMENTS, *BF16_GRADS, "main_grads_dtype=bfloat16"),
    "no-critic": NO_CRITIC,
    "no-critic-recompute-offload": [*NO_CRITIC, *RECOMPUTE, *OFFLOAD],
    "lora": LORA,
    "lora-recompute": [*LORA, *RECOMPUTE],
    "lora-no-critic": [*LORA, *NO_CRITIC],
    "lora-no-critic-recompute": [*LORA, *NO_CRITIC, *RECOMPUTE],
    "lora-no-critic-recompute-offload": [*LORA, *NO_CRITIC, *RECOMPUTE, *OFFLOAD],
}
"""Name → settings; {mlp} is `moe` for a shape with experts. Norms stay: Transformer Engine's don't stand alone."""
NEED_TRANSFORMER_ENGINE = ("bf16-moments", "bf16-moments-grads")
NOT_ENOUGH = "OutOfMemoryError"
FAILED = "failed"
CUT_OFF = "cut off"
TOLD_CHARACTERS = 6000


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(PUBLISHED), default="qwen2.5-1.5b")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES)[:6])
    parser.add_argument("--steps", type=int, default=2)
    random_run.add_arguments(parser)
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="end a case that takes longer, its start too")
    parser.add_argument("--out", type=Path, help="keep each case's metrics and log here")
    parser.add_argument("overrides", nargs="*", help="a.b=c, given to every case")
    options = parser.parse_args(arguments)
    print(f"{options.shape}, {options.prompts * 2} sequences of {sum(options.lengths)} tokens, GiB")
    print("| shape, case | " + " | ".join(COLUMNS) + " |\n" + "|---" * (len(COLUMNS) + 1) + "|", flush=True)
    limited.end_on_sigterm()
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.out or Path(scratch)
        file = random_run.write_experiment(folder, options)
        for case in options.cases:
            figures: dict[str, float] | str = "needs Transformer Engine, which is not installed"
            if case not in NEED_TRANSFORMER_ENGINE or find_spec("transformer_engine_torch") is not None:
                words = [*settings(case, options.shape), *options.overrides]
                figures = measure(file, folder / case, words, options.limit)
            failures += figures in (FAILED, CUT_OFF)
            # As in the docs' table: the shape stands in its first row alone.
            print(row(f"{options.shape}, {case}" if case == options.cases[0] else case, figures), flush=True)
    return min(failures, 1)


def settings(case: str, shape: str) -> list[str]:
    """The settings of a case, for a published shape."""
    mlp = "moe" if "num_experts" in PUBLISHED[shape] else "mlp"
    return [text.replace("{mlp}", mlp) for text in CASES[case]]


def measure(
    file: Path, run_dir: Path, overrides: Sequence[str], seconds: float | None = None
) -> dict[str, float] | str:
    """The metrics of the last step, or why there are none. Nothing is left running."""
    command = random_run.command(file, 1, [*overrides, f"trainer.run_dir={run_dir}"])
    log_file = run_dir.with_suffix(".log")
    with log_file.open("wb") as log:
        code = limited.run(command, seconds, log)
    if code != 0:
        text = log_file.read_text(errors="replace")
        if code is not None and NOT_ENOUGH in text:
            return "does not fit"
        told = "was cut off" if code is None else f"ended with {code}"
        print(f"{' '.join(command)} {told}:\n{text[-TOLD_CHARACTERS:]}", file=sys.stderr)
        return CUT_OFF if code is None else FAILED
    last: dict[str, float] = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
    return last


def row(case: str, figures: Mapping[str, float] | str) -> str:
    """Of a case: the peak of each phase, what waits on the host, seconds of the step, the peak of the run."""
    if isinstance(figures, str):
        return f"| {case} | {figures} |" + " |" * (len(COLUMNS) - 1)
    host = max((value for name, value in figures.items() if name.endswith("/host")), default=0.0)
    cells = [gib(figures.get(f"memory/{phase}/peak")) for phase in PHASES]
    cells += [gib(host), f"{figures['time/step']:.1f}", gib(figures["perf/peak_memory_bytes"])]
    return f"| {case} | " + " | ".join(cells) + " |"


def gib(count: float | None) -> str:
    """Nothing for a phase that is not there."""
    return "" if count is None else f"{count / 2**30:.1f}" if count else "0"


if __name__ == "__main__":
    sys.exit(main())
