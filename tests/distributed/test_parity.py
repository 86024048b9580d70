"""Every layout makes the one-rank optimizer steps: gradients, losses and weights of three PPO steps, in float32."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.parity import Difference, largest_difference, read_folder
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_model, tiny_tokenizer

GRADIENT_LIMIT = 1e-5
LOSS_LIMIT = 1e-5
WEIGHT_LIMIT = 1e-3
PLAIN_OPTIMIZER = "actor.optim.use_distributed_optimizer=false,critic.optim.use_distributed_optimizer=false"
ONE_RANK = {
    "one": "",
    "micro-1": "actor.ppo_micro_batch_size_per_gpu=1,critic.ppo_micro_batch_size_per_gpu=1",
    "micro-4": "actor.ppo_micro_batch_size_per_gpu=4,critic.ppo_micro_batch_size_per_gpu=4",
}
TWO_RANKS = {
    "dp2": "",
    "dp2-plain-optimizer": PLAIN_OPTIMIZER,
    "tp2": "layout.tp=2",
    "tp2-sp": "layout.tp=2,layout.sequence_parallel=true",
    "pp2": "layout.pp=2",
}
FOUR_RANKS = {"tp2-pp2": "layout.tp=2,layout.pp=2", "tp2-sp-dp2": "layout.tp=2,layout.sequence_parallel=true"}
BROKEN = {"tp2+sp-norm": TWO_RANKS["tp2-sp"], "pp2+tied-embedding": TWO_RANKS["pp2"]}
LAYOUTS = [*list(ONE_RANK)[1:], *TWO_RANKS, *FOUR_RANKS]


@dataclass(frozen=True)
class Runs:
    """Where the runs wrote, and the metrics of each step of each run."""

    folder: Path
    models: dict[str, Path]
    metrics: dict[str, list[dict[str, Any]]]

    def gradients(self, name: str, role: str) -> Difference:
        return largest_difference(self.folder / name / f"{role}-gradients", self.folder / "one" / f"{role}-gradients")

    def changes(self, name: str, role: str) -> Difference:
        ours, one = (self.folder / run / f"{role}-weights" for run in (name, "one"))
        return largest_difference(ours, one, origin=self.models[role])

    def losses(self, name: str) -> float:
        """Largest difference of a step's actor, critic or KL loss, relative to max(|loss|, 1)."""
        names = ("actor/pg_loss", "actor/kl_loss", "actor/entropy", "critic/vf_loss")
        return max(
            abs(ours[key] - one[key]) / max(abs(one[key]), 1.0)
            for ours, one in zip(self.metrics[name], self.metrics["one"], strict=True)
            for key in names
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("parity")
    # Tied: a pipeline has two copies of the embedding. A value head: the critic's body has a gradient at once.
    actor = tiny_tokenizer(tiny_model(folder / "actor", "qwen3", tied=True, num_layers=2))
    critic = tiny_tokenizer(tiny_model(folder / "critic", "qwen3", tied=True, num_layers=2, value_head=True, seed=1))
    config = _write_experiment(folder, actor, critic)
    metrics: dict[str, list[dict[str, Any]]] = {}
    for num_ranks, layouts in ((1, ONE_RANK), (2, TWO_RANKS | BROKEN), (4, FOUR_RANKS)):
        named = [f"{name}={overrides}" if overrides else name for name, overrides in layouts.items()]
        result = run_ranks(
            "tests.distributed.programs.parity", "--config", config, "--folder", folder, "--runs", *named,
            nproc=num_ranks, timeout=600,
        )  # fmt: skip
        metrics |= {name: [line for line in run["metrics"] if line["step"]] for name, run in result.items()}
    _print_table(found := Runs(folder, {"actor": actor, "critic": critic}, metrics))
    return found


def _write_experiment(folder: Path, actor: Path, critic: Path) -> Path:
    prompts = folder / "train.jsonl"
    lines = [{"prompt": f"add {number} " * (1 + number % 3), "answer": str(number)} for number in range(40)]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    optim = {"lr": 1e-3, "weight_decay": 0.01}
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


def _print_table(runs: Runs) -> None:
    """The table that `pytest -s` shows."""
    print(f"\n{'run':<22}{'actor grad':>12}{'critic grad':>12}{'loss':>12}{'actor Δw':>12}{'critic Δw':>12}")
    for name in (*LAYOUTS, *BROKEN):
        figures = [runs.gradients(name, role).relative for role in ("actor", "critic")] + [runs.losses(name)]
        figures += [runs.changes(name, role).relative for role in ("actor", "critic")]
        print(f"{name:<22}" + "".join(f"{figure:>12.1e}" for figure in figures))


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_before_the_first_step_equal_one_rank(runs: Runs, name: str, role: str) -> None:
    worst = runs.gradients(name, role)
    assert worst.relative <= GRADIENT_LIMIT, worst


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_of_all_steps_equal_one_rank(runs: Runs, name: str) -> None:
    assert runs.losses(name) <= LOSS_LIMIT


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_after_three_steps_moved_as_on_one_rank(runs: Runs, name: str, role: str) -> None:
    worst = runs.changes(name, role)
    assert worst.relative <= WEIGHT_LIMIT, worst


def test_a_dropped_reduction_of_norm_weights_under_sequence_parallelism_is_seen(runs: Runs) -> None:
    worst = runs.gradients("tp2+sp-norm", "actor")
    assert worst.relative > 0.1 and "norm" in worst.tensor
    assert runs.changes("tp2+sp-norm", "actor").relative > 100 * WEIGHT_LIMIT


def test_a_dropped_reduction_of_the_tied_embedding_over_stages_is_seen(runs: Runs) -> None:
    worst = runs.gradients("pp2+tied-embedding", "actor")
    assert worst.relative > 0.1 and worst.tensor == "model.embed_tokens.weight"
    assert runs.changes("pp2+tied-embedding", "actor").relative > 100 * WEIGHT_LIMIT


def test_gradients_are_not_trivially_zero(runs: Runs) -> None:
    for role in ("actor", "critic"):
        norms = {
            name: float(tensor.norm())
            for name, tensor in read_folder(runs.folder / "one" / f"{role}-gradients").items()
        }
        assert min(norms.values()) > 0, min(norms, key=norms.__getitem__)
