"""Training runs on different layouts, compared tensor by tensor in Hugging Face names."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tests.support.ranks import run_ranks

# Overlapped communication in buckets of a few tensors each: tiny models have some 50,000 parameters.
OVERLAP = ",".join(
    f"{role}.optim.{setting}"
    for role in ("actor", "critic")
    for setting in ("overlap_grad_reduce=true", "overlap_param_gather=true", "bucket_size=4000")
)


@dataclass(frozen=True)
class Difference:
    """The largest ‖a − b‖ / ‖b‖ over the tensors of two folders, and where it stands."""

    relative: float
    tensor: str


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face folder, in float64."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118  safe_open is no mapping
                tensors[name] = reader.get_tensor(name).double()
    return tensors


def largest_difference(folder: Path, reference: Path, origin: Path | None = None) -> Difference:
    """Of `folder` against `reference`; with `origin`, of what changed since: ‖Δ − Δ₁‖ / ‖Δ₁‖.

    A tensor that is zero (or unchanged) in the reference must be so in the folder too.
    """
    ours, theirs = read_folder(folder), read_folder(reference)
    assert ours.keys() == theirs.keys(), (
        f"{folder} and {reference} hold different tensors: {ours.keys() ^ theirs.keys()}"
    )
    start = read_folder(origin) if origin is not None else {}
    worst = Difference(0.0, "none")
    for name, expected in theirs.items():
        moved = expected - start.get(name, torch.zeros_like(expected))
        error, size = float((ours[name] - expected).norm()), float(moved.norm())
        relative = error / size if size else (0.0 if error == 0.0 else float("inf"))
        if relative > worst.relative:
            worst = Difference(relative, name)
    return worst


@dataclass(frozen=True)
class Runs:
    """Where the runs wrote, and the metrics of each step of each run."""

    folder: Path
    models: dict[str, Path]
    metrics: dict[str, list[dict[str, Any]]]

    def gradients(self, name: str, role: str, reference: str = "one") -> Difference:
        ours, one = (self.folder / run / f"{role}-gradients" for run in (name, reference))
        return largest_difference(ours, one)

    def changes(self, name: str, role: str, reference: str = "one") -> Difference:
        ours, one = (self.folder / run / f"{role}-weights" for run in (name, reference))
        return largest_difference(ours, one, origin=self.models[role])

    def gradient_norms(self, name: str, reference: str = "one") -> float:
        """Largest relative difference of a step's gradient norms, which clipping divides by."""
        return self._largest(name, ("actor/grad_norm", "critic/grad_norm"), smallest=0.0, reference=reference)

    def losses(self, name: str, reference: str = "one") -> float:
        """Largest difference of a step's actor, critic or KL loss, relative to max(|loss|, 1)."""
        names = ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "critic/vf_loss")
        return self._largest(name, names, smallest=1.0, reference=reference)

    def _largest(self, name: str, names: Sequence[str], smallest: float, reference: str = "one") -> float:
        return max(
            abs(ours[key] - one[key]) / max(abs(one[key]), smallest)
            for ours, one in zip(self.metrics[name], self.metrics[reference], strict=True)
            for key in names
        )


def parity_runs(
    folder: Path,
    actor: Path,
    critic: Path,
    layouts: Mapping[int, Mapping[str, str]],
    of_other_models: Mapping[str, str] | None = None,
) -> Runs:
    """Three PPO steps of each layout. `layouts`: number of ranks → name → overrides; `one` is what all compare with.
    `of_other_models`: the run on one rank that those compare with whose overrides name other models."""
    config = write_experiment(folder, actor, critic)
    metrics: dict[str, list[dict[str, Any]]] = {}
    for num_ranks, named in layouts.items():
        metrics |= run_layouts(folder, config, num_ranks, named)
    _print_table(found := Runs(folder, {"actor": actor, "critic": critic}, metrics), of_other_models or {})
    return found


def run_layouts(
    folder: Path, config: Path, num_ranks: int, named: Mapping[str, str]
) -> dict[str, list[dict[str, Any]]]:
    """The metrics of each step of each run; `named`: name → overrides. Each run writes into `folder/NAME`."""
    words = [f"{name}={overrides}" if overrides else name for name, overrides in named.items()]
    result = run_ranks(
        "tests.distributed.programs.parity", "--config", config, "--folder", folder, "--runs", *words,
        nproc=num_ranks, timeout=600, torchrun=torch.cuda.is_available(),
    )  # fmt: skip
    return {name: [line for line in run["metrics"] if line["step"]] for name, run in result.items()}


def write_experiment(folder: Path, actor: Path, critic: Path) -> Path:
    prompts = folder / "train.jsonl"
    lines = [{"prompt": f"add {number} " * (1 + number % 3), "answer": str(number)} for number in range(40)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    # AdamW scales every gradient to the rate, however small: with its usual eps of 1e-8, one element whose gradient is
    # rounding alone (1 of 2048, measured at tp 2) moves a tensor's difference from 3e-5 to 1e-3.
    optim = {"lr": 1e-3, "weight_decay": 0.01, "eps": 1e-6}
    experiment = {
        "model": {"path": str(actor), "dtype": "float32", "layers": "torch"},
        "actor": {
            "ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 2, "use_kl_loss": True, "kl_loss_coef": 0.05,
            "entropy_coeff": 0.01, "optim": optim,
        },
        "critic": {"path": str(critic), "ppo_mini_batch_size": 8, "optim": optim},
        "algorithm": {"gamma": 0.99, "lam": 0.95, "use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "kl_coef":
        0.05}},
        "rollout": {"n": 2},
        "reward": {"parts": [
            {"name": "length", "kind": "function", "function": "tests.support.rewards:length_reward"}
        ]},
        "data": {
            "train_files": [str(prompts)], "train_batch_size": 8, "max_prompt_length": 32, "max_response_length": 12,
            "apply_chat_template": False,
        },
        "trainer": {"run_dir": str(folder / "run"), "total_steps": 3, "save_last": False},
        "observe": {"tensorboard": False, "samples_freq": 0},
    }  # fmt: skip
    file = folder / "parity.yaml"
    file.write_text(json.dumps(experiment))  # JSON is YAML
    return file


def _print_table(runs: Runs, of_other_models: Mapping[str, str]) -> None:
    """The table that `pytest -s` shows."""
    print(f"\n{'run':<22}{'actor grad':>12}{'critic grad':>12}{'loss':>12}{'actor Δw':>12}{'critic Δw':>12}")
    for name in runs.metrics:
        if name in of_other_models:
            print(f"{name:<22}{'':>24}{runs.losses(name, of_other_models[name]):>12.1e}")
            continue
        figures = [runs.gradients(name, role).relative for role in ("actor", "critic")] + [runs.losses(name)]
        figures += [runs.changes(name, role).relative for role in ("actor", "critic")]
        print(f"{name:<22}" + "".join(f"{figure:>12.1e}" for figure in figures))
