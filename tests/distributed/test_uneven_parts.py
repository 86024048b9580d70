"""Data-parallel ranks that share parameters whose sizes they don't divide: gradients, steps, checkpoints and exports.

The critic's hidden size of 32 is no multiple of 3, so that no parameter has an axis that three ranks divide; of its
value head, and of its norms of 4, the last rank has nothing. The actor is cut as Qwen2.5-1.5B is over 3, 6 or 24 ranks:
its matrices evenly, the 80 rows of its biases of q, k and v in 27, 27 and 26.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.test_fsdp import CUT, PLAIN, differing, moved_otherwise, resumed, run_all
from tests.support.parity import Runs, largest_difference, parity_runs, read_folder
from tests.support.runs import learning, write_run_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer

GRADIENT_LIMIT = 1e-5
LOSS_LIMIT = 1e-5
WEIGHT_LIMIT = 1e-3
MIXED: dict[str, Any] = {"hidden_size": 48, "num_heads": 3, "num_kv_heads": 1}
UNEVEN: dict[str, Any] = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
# What one, two and three ranks divide.
BATCHES = "data.train_batch_size=6,actor.ppo_mini_batch_size=3,actor.ppo_micro_batch_size_per_gpu=1"
RUN_BATCHES = f"{BATCHES},data.val_files=[],trainer.test_freq=0"
LEAN = "actor.fsdp.reduce_each_micro_batch=false,critic.fsdp.reshard_after_forward=false"


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("steps")
    actor = tiny_tokenizer(tiny_model(folder / "actor", "qwen2", tied=True, **MIXED))
    critic = tiny_tokenizer(tiny_model(folder / "critic", "qwen3", value_head=True, seed=1, **UNEVEN))
    batches = f"{BATCHES},critic.ppo_mini_batch_size=6"
    layouts = {1: {"one": batches}, 3: {"cut": f"{batches},{CUT}", "lean": f"{batches},{CUT},{LEAN}"}}
    return parity_runs(folder, actor, critic, layouts)


@pytest.mark.parametrize("name", ["cut", "lean"])
def test_three_ranks_make_the_steps_of_one(steps: Runs, name: str) -> None:
    for role in ("actor", "critic"):
        gradients, changes = steps.gradients(name, role), steps.changes(name, role)
        assert gradients.relative <= GRADIENT_LIMIT, gradients
        assert changes.relative <= WEIGHT_LIMIT, changes
    assert steps.losses(name) <= LOSS_LIMIT
    assert steps.gradient_norms(name) <= LOSS_LIMIT, "an absent part adds nothing to the norm, and none counts twice"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("uneven")
    write_run_experiment(folder)
    tiny_model(folder / "model", "qwen3", tied=True, **UNEVEN)
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[str, Any]:
    """One on three ranks, one on one, and such as go on from either's second step."""
    found = run_all(folder, {
        3: {"three": f"{CUT},{RUN_BATCHES},trainer.save_freq=2"},
        1: {"one": f"{PLAIN},{RUN_BATCHES},trainer.save_freq=2"},
    })  # fmt: skip
    crossed = {
        3: {"again": f"{CUT},{RUN_BATCHES},{resumed(folder, 'three')}",
            "one-to-three": f"{CUT},{RUN_BATCHES},{resumed(folder, 'one')}"},
        2: {"three-to-two": f"{CUT},{RUN_BATCHES},{resumed(folder, 'three')},trainer.save_freq=2",
            "three-to-tp2": f"{PLAIN},layout.tp=2,{RUN_BATCHES},{resumed(folder, 'three')}"},
        1: {"three-to-one": f"{PLAIN},{RUN_BATCHES},{resumed(folder, 'three')}"},
    }  # fmt: skip
    return found | run_all(folder, crossed)


@pytest.mark.parametrize("name", ["three", "one-to-three", "three-to-two", "three-to-tp2", "three-to-one"])
def test_a_run_goes_on_with_any_number_of_ranks(runs: dict[str, Any], folder: Path, name: str) -> None:
    steps = [3] if "-to-" in name else [1, 2, 3]
    assert differing(folder, name, "one", after=steps[0] - 1) == {step: [] for step in steps}
    assert moved_otherwise(folder, name, "one").relative <= WEIGHT_LIMIT


def test_a_resumed_run_is_the_run_without_the_break_bit_for_bit(runs: dict[str, Any], folder: Path) -> None:
    assert learning(folder / "again", 2) == learning(folder / "three", 2)
    ours, theirs = ([rank["trained"] for rank in runs[run]["ranks"]] for run in ("again", "three"))
    assert ours == theirs and len(ours) == 3
    assert largest_difference(*(folder / run / "hf" / "step-000003" for run in ("again", "three"))).relative == 0


def test_an_export_writes_the_weights_that_were_read(runs: dict[str, Any], folder: Path) -> None:
    ours, theirs = read_folder(folder / "three-untrained"), read_folder(folder / "model")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_ranks_hold_parts_that_make_up_the_whole(runs: dict[str, Any]) -> None:
    """Parts are padded to a third, rounded up, of each parameter's rows: at most one row more than the first rank's."""
    (whole,) = runs["one"]["ranks"]
    for role in ("actor", "critic", "ref"):
        numel, parts = whole["held"][role]["numel"], [rank["held"][role] for rank in runs["three"]["ranks"]]
        assert all(part["numel"] == numel and part["gathered"] == 0 for part in parts)
        assert all(4 * numel / 3 < part["params"] < 1.1 * 4 * numel / 3 for part in parts)


def test_generation_runs_on_whole_parameters(runs: dict[str, Any]) -> None:
    assert all(rank["alone"] for rank in runs["three"]["ranks"])
