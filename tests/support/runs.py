"""Whole runs through the command line: a tiny experiment, starting `megappo`, and reading what a run leaves."""

import json
import math
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.support.ranks import ROOT, rank_environment
from tests.support.tiny_models import tiny_model, tiny_tokenizer

REWARDS = "tests.distributed.programs.reward_functions"

# 14 prompts in steps of 4: an epoch has 3 steps and leaves 2 prompts out. Each step makes 2 minibatches × 2 epochs.
EXPERIMENT = """\
model: {{path: {folder}/model, dtype: float32, layers: torch}}
data:
  train_files: [{folder}/train.jsonl]
  val_files: [{folder}/held_out.jsonl]
  train_batch_size: 4
  max_prompt_length: 24
  max_response_length: 8
  apply_chat_template: false
rollout: {{n: 2, temperature: 1.0}}
reward: {{parts: [{{name: sum, kind: function, function: "{rewards}:spread"}}]}}
algorithm: {{gamma: 0.99, lam: 0.95, use_kl_in_reward: true, kl_ctrl: {{type: adaptive, kl_coef: 0.05}}}}
actor:
  ppo_mini_batch_size: 2
  ppo_micro_batch_size_per_gpu: 2
  ppo_epochs: 2
  use_kl_loss: true
  kl_loss_coef: 0.05
  entropy_coeff: 0.01
  optim: {{lr: 1.0e-3, lr_scheduler_type: cosine, lr_warmup_steps: 6, lr_decay_steps: 40}}
critic:
  optim: {{lr: 1.0e-3, lr_scheduler_type: cosine, lr_warmup_steps: 6, lr_decay_steps: 40}}
trainer: {{run_dir: {folder}/run, total_steps: 10, val_before_train: false, test_freq: 4}}
observe: {{tensorboard: false}}
"""


EVERYTHING_OFFLOADED = ",".join(
    [f"{role}.offload.{kind}=true" for role in ("actor", "critic") for kind in ("params", "grads", "optimizer")]
    + ["ref.offload.params=true"]
)
"""Overrides."""


def write_run_experiment(folder: Path) -> Path:
    """A PPO experiment of 10 steps on a model of 2 layers, 4 heads and 2 KV heads; returns its file."""
    tiny_model(folder / "model", "llama", tied=True)
    tiny_tokenizer(folder / "model")
    for name, first, count in (("train", 0, 14), ("held_out", 50, 4)):
        numbers = range(first, first + count)
        rows = [{"prompt": f"add {number}" * (1 + number % 3), "answer": str(number)} for number in numbers]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = folder / "experiment.yaml"
    file.write_text(EXPERIMENT.format(folder=folder, rewards=REWARDS))
    return file


def reward(name: str) -> str:
    """The override that scores with another function of `reward_functions.py`."""
    return f"reward.parts=[{{name: sum, kind: function, function: '{REWARDS}:{name}'}}]"


@dataclass(frozen=True)
class Finished:
    """How a command ended: exit code, standard output, standard error, seconds."""

    code: int
    out: str
    err: str
    seconds: float


class Running:
    """A `megappo` command in a process of its own, with all that it has started."""

    def __init__(self, *words: object, **environment: str) -> None:
        self.begin = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megappo", *map(str, words)], cwd=ROOT, text=True,
            env=rank_environment() | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def wait_for_step(self, run: Path, step: int, timeout: float = 120) -> None:
        """Returns when the metrics of `step` are on disk; the next step has then begun."""
        while not any(line["step"] >= step for line in metrics(run)):
            assert self.process.poll() is None, f"the run ended before step {step}:\n{self.finish().err}"
            assert time.monotonic() - self.begin < timeout, f"no step {step} within {timeout:.0f} s"
            time.sleep(0.05)

    def family(self) -> list[psutil.Process]:
        """The launcher, its ranks, and what these have started."""
        launcher = psutil.Process(self.process.pid)
        return [launcher, *launcher.children(recursive=True)]

    def rank(self, number: int) -> psutil.Process:
        ranks = psutil.Process(self.process.pid).children()
        return next(process for process in ranks if process.environ().get("RANK") == str(number))

    def finish(self, timeout: float = 300) -> Finished:
        """Waits for the end; kills the launcher (and with it the ranks) where it takes longer."""
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            out, err = self.process.communicate()
            raise AssertionError(f"the command took over {timeout:.0f} s:\n{out}\n{err}") from None
        return Finished(self.process.returncode, out, err, time.monotonic() - self.begin)


def megappo(*words: object, **environment: str) -> Finished:
    """Runs one command line to its end."""
    return Running(*words, **environment).finish()


def succeed(*words: object, **environment: str) -> Finished:
    """Runs one command line that must return 0."""
    finished = megappo(*words, **environment)
    assert finished.code == 0, finished.out[-2000:] + finished.err[-6000:]
    return finished


def metrics(run: Path) -> list[dict[str, Any]]:
    """The complete lines of a run's metrics so far."""
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def learning(run: Path, after: int = 0) -> list[dict[str, Any]]:
    """The metrics of the steps after `after` without those that a clock, the memory or the number of ranks makes, and
    without the check of the switch, which the first step of every process has."""
    return [
        {name: value for name, value in line.items() if not _is_measured(name)}
        for line in metrics(run)
        if line["step"] > after
    ]


def differing_metrics(
    run: Path, whole: Path, after: int = 0, *, limit: float = 0.0, without: tuple[str, ...] = ()
) -> dict[int, list[str]]:
    """Step → the metrics of `run` that `whole` has otherwise: one of the two has no such metric, or they differ by more
    than `limit`, as a part of the larger or in itself. Of the steps after `after`; those that begin with `without`
    need only be there."""
    expected = {int(line["step"]): line for line in learning(whole)}
    found = {}
    for mine in learning(run, after):
        theirs = expected[int(mine["step"])]
        found[int(mine["step"])] = [
            name for name in sorted(mine.keys() | theirs.keys())
            if not (name in mine and name in theirs)
            or not (name.startswith(without) or math.isclose(mine[name], theirs[name], rel_tol=limit, abs_tol=limit))
        ]  # fmt: skip
    return found


def status(run: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "status.json").read_text())
    return content


def _is_measured(name: str) -> bool:
    measured = ("wall_time", "time/", "perf/", "hybrid/held", "hybrid/peak", "hybrid/probe")
    return name.startswith(measured) or "seconds" in name or "tokens_per_second" in name or is_of_ranks(name)


def is_of_ranks(name: str) -> bool:
    """Whether a metric says how sequences are spread over data-parallel ranks."""
    return name.startswith(("balance/", "global_seqlen/")) or name.endswith("/micro_batches")
