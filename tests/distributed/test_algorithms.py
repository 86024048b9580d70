"""Three PPO steps with other estimators, losses, KLs and corrections: two ranks make the steps of one."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.parity import Difference, largest_difference, run_layouts, write_experiment
from tests.support.runs import is_of_ranks
from tests.support.tiny_models import tiny_model, tiny_tokenizer

# The experiment that they change has KL in the loss and in the reward, an entropy bonus, n = 2 and two minibatches.
VARIANTS = {
    "grpo": "algorithm.adv_estimator=grpo,actor.policy_loss.loss_mode=gspo,actor.kl_loss_type=full,"
    "algorithm.kl_penalty=full,algorithm.rollout_correction.rollout_is=token,actor.ppo_epochs=2,"
    "actor.entropy_decay_steps=6",
    "remax": "algorithm.adv_estimator=remax,actor.policy_loss.loss_mode=cispo,"
    "actor.loss_agg_mode=seq-mean-token-sum-norm,algorithm.rollout_correction.bypass_mode=true,actor.kl_loss_type=k3+",
    # Minibatches of one prompt: its two responses are on different ranks.
    "rloo": "algorithm.adv_estimator=rloo,actor.ppo_mini_batch_size=1,actor.ppo_micro_batch_size_per_gpu=1,"
    "algorithm.normalize_scores=true,algorithm.rollout_correction.rollout_is=sequence,actor.loss_agg_mode=seq-mean-token-mean",
    "vapo": "algorithm.adv_estimator=vapo,trainer.critic_warmup=1,actor.target_kl_per_step=1e-9,actor.ppo_epochs=2,"
    "algorithm.lam_length_alpha=0.5,algorithm.rollout_correction.rollout_is=icepop,actor.entropy_decay_steps=100",
}
# `grpo` has everything that reads the vocabulary's shards.
LAYOUTS = {
    "grpo": {"dp2": "", "tp2": "layout.tp=2", "pp2": "layout.pp=2"},
    "remax": {"dp2": ""},
    "rloo": {"dp2": ""},
    "vapo": {"dp2": ""},
}
LIMIT = 1e-5
COMPARED = (
    "actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/grad_norm", "actor/ppo_kl_k3", "critic/vf_loss",
    "critic/grad_norm", "reward/token_reward", "rollout/is_mean", "kl/reward_coef",
)  # fmt: skip

Metrics = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("algorithms")


@pytest.fixture(scope="module")
def metrics(folder: Path) -> Metrics:
    """The steps of each variant on one rank (`grpo`) and on two (`grpo-dp2`, `grpo-tp2`)."""
    actor = tiny_tokenizer(tiny_model(folder / "actor", "qwen3", tied=True, num_layers=2))
    critic = tiny_tokenizer(tiny_model(folder / "critic", "qwen3", tied=True, num_layers=2, value_head=True, seed=1))
    config = write_experiment(folder, actor, critic)
    two = {
        f"{name}-{layout}": ",".join(filter(None, (overrides, more)))
        for name, overrides in VARIANTS.items()
        for layout, more in LAYOUTS[name].items()
    }
    return run_layouts(folder, config, 1, VARIANTS) | run_layouts(folder, config, 2, two)


@pytest.mark.parametrize("name", VARIANTS)
def test_two_ranks_make_the_steps_of_one(metrics: Metrics, folder: Path, name: str) -> None:
    for layout in LAYOUTS[name]:
        worst = gradients(folder, name, layout)
        largest = 0.0
        for ours, one in zip(metrics[f"{name}-{layout}"], metrics[name], strict=True):
            assert {key for key in ours if not is_of_ranks(key)} == {key for key in one if not is_of_ranks(key)}
            for key in COMPARED:
                if key in one:
                    largest = max(largest, abs(ours[key] - one[key]) / max(abs(one[key]), 1.0))
        print(f"\n{name:<8}{layout:<5} gradients {worst.relative:.0e}  metrics {largest:.0e}", end="")
        assert worst.relative <= LIMIT, worst
        assert largest <= LIMIT
    print()


def gradients(folder: Path, name: str, layout: str) -> Difference:
    return largest_difference(
        folder / f"{name}-{layout}" / "actor-gradients", folder / name / "actor-gradients"
    )  # fmt: skip


def test_estimators_without_a_critic_build_none(metrics: Metrics, folder: Path) -> None:
    for name in ("grpo", "remax", "rloo"):
        assert not any(key.startswith("critic/") for line in metrics[name] for key in line)
        assert not (folder / name / "critic-weights").exists()
    assert (folder / "vapo" / "critic-weights").exists()


def test_the_entropy_bonus_decays_over_optimizer_steps(metrics: Metrics) -> None:
    """Four optimizer steps a step: at 0 1 2 3 of 6, then 4 5 and twice the end."""
    coefficients = [line["actor/entropy_coeff"] for line in metrics["grpo"]]
    assert coefficients == pytest.approx([0.01 * 0.75, 0.01 * 0.5 / 4, 0.0])


def test_a_critic_warms_up_alone_and_updates_end_when_the_policy_has_moved(metrics: Metrics) -> None:
    """Of four minibatches the first is on-policy, and the second sees that the first moved the policy: two are taken,
    which the decay of the entropy bonus counts."""
    assert [("actor/pg_loss" in line, "critic/vf_loss" in line) for line in metrics["vapo"]] == [
        (False, True), (True, True), (True, True)
    ]  # fmt: skip
    for line, updates in zip(metrics["vapo"][1:], ((0, 1), (2, 3)), strict=True):
        assert line["actor/entropy_coeff"] == pytest.approx(0.01 * (1 - sum(updates) / 2 / 100))
        assert 0 < line["actor/ppo_kl_k3"] < 1


def test_bypass_measures_no_mismatch(metrics: Metrics) -> None:
    assert "rollout/k3" not in metrics["remax"][0]
    assert "rollout/k3" in metrics["grpo"][0]
    assert metrics["remax"][0]["actor/ppo_kl"] != 0
