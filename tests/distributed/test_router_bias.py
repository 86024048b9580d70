"""Biases of routers that steps move: alike on every layout, resumed to the bit, and known to the engine."""

from pathlib import Path

import pytest
import torch

from tests.support.expert_runs import assert_third_step_is_the_same, resuming
from tests.support.parity import Runs, read_folder, run_layouts, write_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow  # the rule itself: tests/unit/test_router_bias.py

RATE = 0.01
BALANCED = f"model.moe.bias_update_rate={RATE}"
SP = "layout.tp=2,layout.sequence_parallel=true"
BIAS = "mlp.gate.e_score_correction_bias"
SAVE = "trainer.save_freq=1"
OTHER_CUT = "actor.ppo_micro_batch_size_per_gpu=1,critic.ppo_micro_batch_size_per_gpu=4"
# Large enough that an engine with the biases of the step before would send tokens elsewhere.
NO_CRITIC = "algorithm.adv_estimator=grpo,algorithm.use_kl_in_reward=false"
NATIVE = f"model.moe.bias_update_rate=0.3,hybrid.check_every=1,{NO_CRITIC}"
EP2 = f"{BALANCED},layout.ep=2,{SAVE}"
SLOW = {
    1: {"cut": f"{BALANCED},{OTHER_CUT}", "native": NATIVE, "off": ""},
    2: {
        "pp2": f"{BALANCED},layout.pp=2",
        "native-pp2": f"{NATIVE},layout.pp=2",
        "native-ep2": f"{NATIVE},layout.ep=2,rollout.tensor_model_parallel_size=2",
    },
    4: {"tp2-sp-dp2-ep2": f"{BALANCED},{SP},layout.ep=2"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("bias")
    models = {
        "actor": tiny_tokenizer(tiny_model(folder / "actor", "deepseek_v3", num_layers=4, seed=3)),
        "critic": tiny_tokenizer(tiny_model(folder / "critic", "deepseek_v3", num_layers=4, seed=4, value_head=True)),
    }
    config = write_experiment(folder, **models)
    metrics = run_layouts(folder, config, 1, {"one": BALANCED})
    metrics |= run_layouts(folder, config, 2, {"ep2": EP2})
    return Runs(folder, models, metrics)


@pytest.fixture(scope="module")
def more(runs: Runs) -> Runs:
    again = resuming(runs.folder, {"ep2-again": (EP2, "ep2")})
    for num_ranks, named in (SLOW | {2: SLOW[2] | again}).items():
        runs.metrics.update(run_layouts(runs.folder, runs.folder / "parity.yaml", num_ranks, named))
    return runs


def biases(folder: Path) -> torch.Tensor:
    """[layers, experts] of a Hugging Face folder."""
    found = {name: tensor for name, tensor in read_folder(folder).items() if name.endswith(BIAS)}
    assert len(found) > 1
    return torch.stack([found[name] for name in sorted(found)])


@pytest.mark.parametrize(("role", "num_updates"), [("actor", 6), ("critic", 3)])
def test_each_update_moves_them_by_the_rate(runs: Runs, role: str, num_updates: int) -> None:
    before, after = biases(runs.models[role]), biases(runs.folder / "one" / f"{role}-weights")
    moves = (after - before) / RATE
    assert (moves - moves.round()).abs().max() < 1e-3
    assert 0 < moves.abs().max() < num_updates + 0.5
    # The loads of a layer differ: some experts go up and some down.
    assert (moves > 0.5).any(1).all() and (moves < -0.5).any(1).all()


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_without_a_rate_they_stay(more: Runs, role: str) -> None:
    assert torch.equal(biases(more.folder / "off" / f"{role}-weights"), biases(more.models[role]))
    assert not any("router_max_bias" in key for line in more.metrics["off"] for key in line)


def same_biases(runs: Runs, name: str) -> bool:
    return all(
        torch.equal(*(biases(runs.folder / run / f"{role}-weights") for run in (name, "one")))
        for role in ("actor", "critic")
    )


def test_two_ranks_that_share_experts_have_those_of_one_to_the_bit(runs: Runs) -> None:
    assert same_biases(runs, "ep2")


@pytest.mark.parametrize("name", ["cut", "pp2", "tp2-sp-dp2-ep2"])
def test_so_has_every_cut_and_layout(more: Runs, name: str) -> None:
    assert same_biases(more, name)


def test_the_largest_is_a_metric(runs: Runs) -> None:
    """The critic makes one update a step, the actor two, of which the metric is the mean."""
    last = runs.metrics["one"][-1]
    largest = {role: float(biases(runs.folder / "one" / f"{role}-weights").abs().max()) for role in ("actor", "critic")}
    assert last["critic/router_max_bias"] == pytest.approx(largest["critic"], abs=1e-7)
    assert abs(last["actor/router_max_bias"] - largest["actor"]) <= RATE


def test_a_resumed_run_has_them_to_the_bit(more: Runs) -> None:
    saved = assert_third_step_is_the_same(more.folder / "ep2" / "run", more.folder / "ep2-again" / "run")
    assert any(key.endswith("router.expert_bias") for key in saved)


@pytest.mark.parametrize("name", ["native", "native-pp2", "native-ep2"])
def test_the_engine_generates_with_the_new_ones(more: Runs, name: str) -> None:
    """On the training shards, over stages, and in a layout of its own."""
    for line in more.metrics[name]:
        assert line["hybrid/probe_diff_max"] <= 1e-5
        assert line["rollout/log_prob_diff_max"] <= 1e-5
    # They have moved by much between the checks.
    assert more.metrics[name][-1]["actor/router_max_bias"] > 0.5
