"""Choices of experts that are taken over, and the routers' losses, give the one-rank gradients on every layout; and
with the rollout's own choices its log-probs are the trainer's, where near-ties let rounding choose."""

from pathlib import Path

import pytest

from tests.support.near_ties import with_near_ties
from tests.support.parity import Runs, largest_difference, run_layouts, write_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow  # in short: test_together.py

GRADIENT_LIMIT = 1e-5
LOSSES = "model.moe.aux_loss_coeff=0.1,model.moe.z_loss_coeff=0.05,trainer.total_steps=2"
REPLAY = f"actor.router_replay=rollout,{LOSSES}"
OTHER_CUT = ",".join(
    [
        "actor.ppo_micro_batch_size_per_gpu=1",
        "actor.log_prob_micro_batch_size_per_gpu=4",
        "critic.ppo_micro_batch_size_per_gpu=4",
    ]
)
SP = "layout.tp=2,layout.sequence_parallel=true"
ONE_RANK = {
    "one": REPLAY,
    "cut": f"{REPLAY},{OTHER_CUT}",
    "own": LOSSES,
    "own-cut": f"{LOSSES},{OTHER_CUT}",
    "no-losses": "trainer.total_steps=2",
}
TWO_RANKS = {
    "dp2-ep2": f"{REPLAY},layout.ep=2",
    "tp2-sp-ep2": f"{REPLAY},{SP},layout.ep=2",
    "allgather": f"{REPLAY},{SP},layout.ep=2,model.moe.dispatcher=allgather",
    "pp2": f"{REPLAY},layout.pp=2",
    "own-pp2": f"{LOSSES},layout.pp=2",
    "own-tp2-sp": f"{LOSSES},{SP}",
}
FOUR_RANKS = {"tp2-sp-dp2-ep2": f"{REPLAY},{SP},layout.ep=2"}
REPLAYED = ["cut", "dp2-ep2", "tp2-sp-ep2", "allgather", "pp2", "tp2-sp-dp2-ep2"]
LATENT_LAYOUTS = {"latent-tp2-sp-ep2": f"{SP},layout.ep=2", "latent-pp2": "layout.pp=2"}
OWN = ["own-cut", "own-pp2", "own-tp2-sp"]


def native(folder: Path, mode: str, *others: str) -> str:
    """A run that generates itself, without learning."""
    settings = [f"model.path={folder / 'ties'}", f"critic.path={folder / 'critic'}", f"actor.router_replay={mode}"]
    return ",".join([*settings, "trainer.total_steps=1", "hybrid.check_limit=9", *others])


def latent(folder: Path, *others: str) -> str:
    """A run of DeepSeek-V3, with choices taken over."""
    paths = f"model.path={folder / 'latent'},critic.path={folder / 'latent-critic'}"
    return ",".join([REPLAY, paths, "trainer.total_steps=1", *others])


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("replay")
    actor = tiny_tokenizer(tiny_model(folder / "actor", "qwen2_moe", norm_topk_prob=True))
    critic = tiny_tokenizer(tiny_model(folder / "critic", "qwen2_moe", value_head=True, seed=1))
    with_near_ties(tiny_tokenizer(tiny_model(folder / "ties", "qwen2_moe", seed=2)))
    for name, settings in (("latent", {}), ("latent-critic", {"value_head": True})):
        tiny_tokenizer(tiny_model(folder / name, "deepseek_v3", num_layers=4, seed=3, **settings))
    one = (
        {"latent": latent(folder)}
        | ONE_RANK
        | {f"native-{mode}": native(folder, mode) for mode in ("off", "rollout", "old_log_probs")}
    )
    two = (
        TWO_RANKS
        | {name: latent(folder, layout) for name, layout in LATENT_LAYOUTS.items()}
        | {
            "native-tp2-sp": native(folder, "rollout", SP, "layout.etp=2"),
            "native-pp2": native(folder, "rollout", "layout.pp=2"),
            "native-dp2-ep2": native(folder, "rollout", "layout.ep=2", "rollout.tensor_model_parallel_size=2"),
        }
    )
    config, metrics = write_experiment(folder, actor, critic), {}
    for num_ranks, named in ((1, one), (2, two), (4, FOUR_RANKS)):
        metrics |= run_layouts(folder, config, num_ranks, named)
    return Runs(folder, {"actor": actor, "critic": critic}, metrics)


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", REPLAYED)
def test_gradients_with_choices_taken_over_equal_one_rank(runs: Runs, name: str, role: str) -> None:
    worst = runs.gradients(name, role)
    assert worst.relative <= GRADIENT_LIMIT, worst


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", OWN)
def test_gradients_of_router_losses_equal_one_rank_without_replay(runs: Runs, name: str, role: str) -> None:
    ours, one = (runs.folder / run / f"{role}-gradients" for run in (name, "own"))
    worst = largest_difference(ours, one)
    assert worst.relative <= GRADIENT_LIMIT, worst


@pytest.mark.parametrize("role", ["actor", "critic"])
@pytest.mark.parametrize("name", LATENT_LAYOUTS)
def test_gradients_of_latent_attention_equal_one_rank(runs: Runs, name: str, role: str) -> None:
    ours, one = (runs.folder / run / f"{role}-gradients" for run in (name, "latent"))
    worst = largest_difference(ours, one)
    assert worst.relative <= GRADIENT_LIMIT, worst


def test_replay_and_losses_change_the_gradients(runs: Runs) -> None:
    for name, other in (("one", "own"), ("own", "no-losses")):
        ours, theirs = (runs.folder / run / "actor-gradients" for run in (name, other))
        assert largest_difference(ours, theirs).relative > 0.01


@pytest.mark.parametrize("name", [*REPLAYED, *OWN])
def test_metrics_of_routers_equal_one_rank(runs: Runs, name: str) -> None:
    for ours, one in zip(runs.metrics[name], runs.metrics["own" if name in OWN else "one"], strict=True):
        for key in ("aux_loss", "z_loss", "max_load", "changed"):
            assert ours[f"actor/router_{key}"] == pytest.approx(one[f"actor/router_{key}"], rel=1e-4), key


def test_choices_drawn_at_random_are_taken_over(runs: Runs) -> None:
    """A pair of four experts is the router's own with probability 1/6; the last token of a sequence is its own."""
    for metrics in runs.metrics["one"]:
        assert metrics["actor/router_changed"] == pytest.approx(5 / 6, abs=0.1)
        assert metrics["rollout/router_changed"] == pytest.approx(5 / 6, abs=0.1)
    assert all(metrics["actor/router_changed"] == 0 for metrics in runs.metrics["own"])


def test_replay_makes_log_probs_of_rollout_and_trainer_agree(runs: Runs) -> None:
    mean, largest = "rollout/log_prob_diff_mean", "rollout/log_prob_diff_max"
    without, recorded, replayed = (runs.metrics[f"native-{mode}"][0] for mode in ("off", "old_log_probs", "rollout"))
    for metrics in (without, recorded, replayed):
        print({key: value for key, value in metrics.items() if "diff" in key or "changed" in key})
    assert recorded[mean] == without[mean]
    assert replayed["rollout/router_changed"] > 0.02
    assert replayed[mean] < 1e-6 < 1e-3 < without[mean]
    assert replayed[largest] < 1e-5 < 1e-3 < without[largest]


@pytest.mark.parametrize("name", ["native-tp2-sp", "native-pp2", "native-dp2-ep2"])
def test_generation_records_its_choices_on_every_layout(runs: Runs, name: str) -> None:
    assert runs.metrics[name][0]["rollout/log_prob_diff_max"] < 1e-5
