"""What context parallelism meets: more layouts, experts, latent attention, whole runs, checkpoints; against one."""

from pathlib import Path

import pytest

from tests.support.parity import Runs, largest_difference, parity_runs, run_layouts, write_experiment
from tests.support.runs import learning, succeed, write_run_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow

GRADIENT_LIMIT = 1e-5
WEIGHT_LIMIT = 1e-3
CP2, A2A = "layout.cp=2", "layout.cp=2,model.cp_comm_type=a2a"
SP = "layout.tp=2,layout.sequence_parallel=true"
# Of one rank's tokens: the longest sequence has 33, and so 18 on each of two ranks.
DYNAMIC = (
    "model.use_remove_padding=true,actor.use_dynamic_bsz=true,actor.ppo_micro_batch_size_per_gpu=null,"
    "actor.ppo_max_token_len_per_gpu=30,actor.log_prob_max_token_len_per_gpu=75,critic.ppo_max_token_len_per_gpu=50"
)
LAYOUTS = {
    2: {"cp2-dynamic": f"{CP2},{DYNAMIC}", "cp2-a2a-packed": f"{A2A},model.use_remove_padding=true"},
    4: {
        "cp4": "layout.cp=4",
        "cp2-pp2-a2a": f"{A2A},layout.pp=2",
        "cp2-dp2-dynamic": f"{CP2},{DYNAMIC}",
        "cp2-tp2-sp-dynamic": f"{CP2},{SP},{DYNAMIC}",
    },
}
ROUTERS = "model.moe.aux_loss_coeff=0.1,model.moe.z_loss_coeff=0.01"
EXPERTS = {
    2: {"cp2": CP2, "cp2-ep2-a2a": f"{A2A},layout.ep=2", "cp2-ep2-dynamic": f"{CP2},layout.ep=2,{DYNAMIC}"},
    4: {"cp2-tp2-sp-ep2": f"{CP2},{SP},layout.ep=2"},
}


def assert_as_one(runs: Runs, names: list[str], roles: tuple[str, ...] = ("actor", "critic")) -> None:
    for name in names:
        for role in roles:
            worst = runs.gradients(name, role)
            assert worst.relative <= GRADIENT_LIMIT, (name, role, worst)
            worst = runs.changes(name, role)
            assert worst.relative <= WEIGHT_LIMIT, (name, role, worst)
        assert runs.losses(name) <= GRADIENT_LIMIT and runs.gradient_norms(name) <= GRADIENT_LIMIT, name


def names_of(layouts: dict[int, dict[str, str]]) -> list[str]:
    return [name for named in layouts.values() for name in named]


def test_more_layouts_make_the_steps_of_one_rank(tmp_path: Path) -> None:
    actor = tiny_tokenizer(tiny_model(tmp_path / "actor", "qwen3", tied=True))
    critic = tiny_tokenizer(tiny_model(tmp_path / "critic", "llama", value_head=True, seed=1))
    assert_as_one(parity_runs(tmp_path, actor, critic, {1: {"one": ""}, **LAYOUTS}), names_of(LAYOUTS))


@pytest.mark.parametrize("replay", ["old_log_probs", "rollout"])
def test_routers_have_the_losses_and_the_replayed_choices_of_one_rank(tmp_path: Path, replay: str) -> None:
    actor = tiny_tokenizer(tiny_model(tmp_path / "actor", "qwen2_moe", tied=True))
    critic = tiny_tokenizer(tiny_model(tmp_path / "critic", "qwen2_moe", tied=True, value_head=True, seed=1))
    more = f"{ROUTERS},actor.router_replay={replay}"
    layouts = {
        num_ranks: {name: f"{overrides},{more}" for name, overrides in named.items()}
        for num_ranks, named in EXPERTS.items()
    }
    runs = parity_runs(tmp_path, actor, critic, {1: {"one": more}, **layouts})
    assert_as_one(runs, names_of(layouts))
    for name in names_of(layouts):
        for ours, one in zip(runs.metrics[name], runs.metrics["one"], strict=True):
            for key in ("actor/router_aux_loss", "actor/router_z_loss", "actor/router_max_load"):
                assert ours[key] == pytest.approx(one[key], rel=1e-5), (name, key)


def test_latent_attention_is_shared_too(tmp_path: Path) -> None:
    actor = tiny_tokenizer(tiny_model(tmp_path / "actor", "deepseek_v3"))
    config = write_experiment(tmp_path, actor, actor)
    alone = "algorithm.adv_estimator=grpo"
    named = {
        "latent-cp2": f"{alone},{CP2}",
        "latent-a2a": f"{alone},{A2A}",
        "latent-packed": f"{alone},{CP2},model.use_remove_padding=true",
    }
    run_layouts(tmp_path, config, 1, {"latent-one": alone})
    run_layouts(tmp_path, config, 2, named)
    for name in named:
        worst = largest_difference(*(tmp_path / run / "actor-gradients" for run in (name, "latent-one")))
        assert worst.relative <= GRADIENT_LIMIT, (name, worst)


def test_whole_runs_and_checkpoints_are_those_of_one_rank(tmp_path: Path) -> None:
    """Generation, evaluation, every metric, the exported weights; and going on from the other's checkpoint."""
    experiment = write_run_experiment(tmp_path)
    runs = {
        "one": [],
        "cp2": ["layout.cp=2"],
        "cp2-a2a-packed": ["layout.cp=2", "model.cp_comm_type=a2a", "model.use_remove_padding=true"],
        # Replicas of two ranks, each of which holds a copy of the weights.
        "cp2-wide": ["layout.cp=2", "rollout.tensor_model_parallel_size=2"],
        "one-resumed": ["trainer.resume={folder}/cp2/checkpoints/step-000002"],
        "cp2-resumed": ["layout.cp=2", "trainer.resume={folder}/one/checkpoints/step-000002"],
    }
    for name, overrides in runs.items():
        words = [word.format(folder=tmp_path) for word in overrides]
        succeed(
            "train", experiment, f"trainer.run_dir={tmp_path / name}", "trainer.total_steps=3",
            "trainer.export_hf=true", "trainer.test_freq=3", "trainer.save_freq=2", *words,
        )  # fmt: skip
    whole = {line["step"]: line for line in learning(tmp_path / "one")}
    exported = {name: tmp_path / name / "hf" / "latest" for name in runs}
    for name in list(runs)[1:]:
        lines = learning(tmp_path / name)
        assert [line["step"] for line in lines] == ([3] if name.endswith("resumed") else [1, 2, 3])
        for line in lines:
            expected = whole[line["step"]]
            assert len(expected) > 40, "the comparison has lost its metrics"
            for key in expected:
                if not key.startswith("hybrid/"):
                    assert line[key] == pytest.approx(expected[key], rel=1e-5, abs=2e-6), (name, line["step"], key)
        worst = largest_difference(exported[name], exported["one"], origin=tmp_path / "model")
        assert worst.relative <= WEIGHT_LIMIT, (name, worst)
