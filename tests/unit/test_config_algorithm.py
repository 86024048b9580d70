"""Rules about estimators, losses and ratios: each message, and that what is allowed passes."""
# ruff: noqa: E501  a line of a table is one case, with the whole message

from pathlib import Path

import pytest

from megappo.config.checks import check_experiment
from megappo.config.load import load_experiment
from megappo.errors import ConfigError
from megappo.planner.batch import plan_batches
from megappo.planner.explain import explain_batches
from tests.support.experiments import small_experiment, write_experiment


def found(folder: Path, *overrides: str) -> list[str]:
    config = load_experiment(write_experiment(folder), overrides)
    return [f"{problem.severity.value} {problem.text()}" for problem in check_experiment(config)]


BYPASS = "algorithm.rollout_correction.bypass_mode=true"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["algorithm.adv_estimator=grpo"], "error rollout.n: 1: algorithm.adv_estimator grpo compares the responses to one prompt, and there is one; at least 2"),
        (["algorithm.adv_estimator=rloo"], "error rollout.n: 1: algorithm.adv_estimator rloo compares"),
        (["algorithm.adv_estimator=reinforce_plus_plus_baseline"], "error rollout.n: 1: "),
        (["rollout.top_p=0.9"], "error rollout.top_p: 0.9: responses would come from a truncated distribution, whose probabilities the trainer does not compute: the ratio would be wrong; 1.0, or algorithm.rollout_correction.bypass_mode true"),
        (["rollout.top_k=50"], "error rollout.top_k: 50: responses would come from a truncated distribution"),
        ([BYPASS, "rollout.top_p=0.9", "algorithm.use_kl_in_reward=true"], "warning algorithm.use_kl_in_reward: true: the old log-probs are those of the truncated distribution"),
        ([BYPASS, "algorithm.rollout_correction.rollout_is=token"], 'error algorithm.rollout_correction.rollout_is: "token": with algorithm.rollout_correction.bypass_mode the old log-probs are the engine\'s own, and every weight would be 1'),
        (["algorithm.rollout_correction.icepop_low=6", "algorithm.rollout_correction.rollout_is=icepop"], "error algorithm.rollout_correction.icepop_low: 6.0: is above icepop_high 5; for example 0.5 and 5.0"),
        (["algorithm.adv_estimator=remax", "trainer.critic_warmup=1"], "error trainer.critic_warmup: 1: algorithm.adv_estimator remax has no critic; 0, or an estimator with a critic: gae, vapo"),
        (["algorithm.adv_estimator=remax", "algorithm.normalize_scores=true"], "error algorithm.normalize_scores: true: the scores of greedy responses, which algorithm.adv_estimator remax takes off, would stay as they are; false, or reward.normalize"),
        (["trainer.critic_warmup=3"], "error trainer.critic_warmup: 3: the actor would never be updated in 3 steps (trainer.total_steps); at most 2"),
        (["algorithm.adv_estimator=remax", "algorithm.lam_actor=0.9"], "warning algorithm.lam_actor: 0.9: does nothing, for algorithm.adv_estimator is remax"),
        (["algorithm.adv_estimator=vapo", "algorithm.lam_actor=0.9"], "warning algorithm.lam_actor: 0.9: does nothing, for vapo has it depend on the length"),
        (["algorithm.norm_adv_by_std_in_grpo=false"], "warning algorithm.norm_adv_by_std_in_grpo: false: does nothing, for algorithm.adv_estimator is gae"),
        (["actor.policy_loss.loss_mode=gspo", "actor.loss_agg_mode=seq-mean-token-sum"], 'warning actor.loss_agg_mode: "seq-mean-token-sum": does nothing, for actor.policy_loss.loss_mode gspo takes seq-mean-token-mean'),
        (["algorithm.adv_estimator=remax", "algorithm.gamma=0.9"], "warning algorithm.gamma: 0.9: does nothing, for algorithm.adv_estimator is remax; set that to one of gae, vapo, reinforce_plus_plus, reinforce_plus_plus_baseline, or leave it out"),
        (["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9", "algorithm.lam=0.9"], "warning algorithm.lam: 0.9: does nothing, for algorithm.adv_estimator is reinforce_plus_plus; set that to gae, or leave it out"),
        (["algorithm.adv_estimator=vapo", "algorithm.lam=0.9"], "warning algorithm.lam: 0.9: does nothing, for vapo has it depend on the length, and 1 for the returns; leave it out"),
        (["algorithm.kl_penalty=k3"], 'warning algorithm.kl_penalty: "k3": does nothing, for algorithm.use_kl_in_reward is false; set that to true, or leave it out'),
        (["algorithm.rollout_correction.rollout_is_threshold=3"], "warning algorithm.rollout_correction.rollout_is_threshold: 3.0: does nothing, for algorithm.rollout_correction.rollout_is is null; set that to token or sequence, or leave it out"),
        (["algorithm.rollout_correction.rollout_is=token", "algorithm.rollout_correction.icepop_high=3"], "warning algorithm.rollout_correction.icepop_high: 3.0: does nothing, for algorithm.rollout_correction.rollout_is is token; set that to icepop, or leave it out"),
        (["actor.policy_loss.loss_mode=gspo", "actor.clip_ratio=0.1"], "warning actor.clip_ratio: 0.1: does nothing, for actor.policy_loss.loss_mode gspo has a clip of its own; set clip_ratio_low and clip_ratio_high alone"),
        (["actor.clip_ratio=0.1", "actor.clip_ratio_low=0.2", "actor.clip_ratio_high=0.3"], "warning actor.clip_ratio: 0.1: does nothing, for clip_ratio_low and clip_ratio_high are set"),
        (["actor.policy_loss.loss_mode=cispo", "actor.clip_ratio_c=4"], "warning actor.clip_ratio_c: 4.0: does nothing, for actor.policy_loss.loss_mode cispo has no dual clip; leave it out"),
        (["algorithm.adv_estimator=remax", "critic.ppo_epochs=2"], "warning critic.ppo_epochs: 2: does nothing, for algorithm.adv_estimator remax has no critic; leave it out"),
        (["algorithm.adv_estimator=remax", "critic.cliprange_value=0.2"], "warning critic.cliprange_value: 0.2: does nothing, for algorithm.adv_estimator remax has no critic; leave it out"),
        (["algorithm.adv_estimator=remax", "actor.loss_scale_length=9"], "warning actor.loss_scale_length: 9: does nothing, for actor.loss_agg_mode is token-mean"),
        (["actor.entropy_coeff_final=0.1"], "warning actor.entropy_coeff_final: 0.1: does nothing, for actor.entropy_decay_steps is null"),
    ],
)  # fmt: skip
def test_each_rule(tmp_path: Path, overrides: list[str], expected: str) -> None:
    lines = found(tmp_path, *overrides)
    assert len(lines) == 1, lines
    assert expected in lines[0]


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.adv_estimator=grpo", "rollout.n=2", "actor.policy_loss.loss_mode=gspo"],
        ["algorithm.adv_estimator=remax"],
        # Read by the critic's loss alone, and by GAE, the KL in the reward and the clip of one side.
        ["actor.loss_scale_length=64", "critic.loss_agg_mode=seq-mean-token-sum-norm"],
        ["algorithm.gamma=0.9", "algorithm.lam=0.9", "algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=k3"],
        ["actor.clip_ratio=0.1", "actor.clip_ratio_low=0.2", "actor.policy_loss.loss_mode=cispo"],
        ["algorithm.rollout_correction.rollout_is=icepop", "algorithm.rollout_correction.icepop_high=3"],
        ["algorithm.adv_estimator=reinforce_plus_plus"],
        ["algorithm.adv_estimator=vapo", "trainer.critic_warmup=2"],
        [BYPASS, "rollout.top_p=0.9", "rollout.top_k=50"],
        ["algorithm.rollout_correction.rollout_is=sequence"],
        ["actor.use_kl_loss=true", "actor.kl_loss_type=full", "layout.tp=3"],
        ["actor.use_kl_loss=true", "actor.kl_loss_type=full", "layout.pp=2"],
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=full", "layout.pp=2"],
        ["actor.entropy_coeff=0.01", "actor.entropy_decay_steps=10"],
    ],
)
def test_what_is_allowed(tmp_path: Path, overrides: list[str]) -> None:
    assert found(tmp_path, *overrides) == []


@pytest.mark.parametrize("name", ["full+", "k4", "k3++"])
@pytest.mark.parametrize("path", ["actor.kl_loss_type", "algorithm.kl_penalty"])
def test_other_kl_names_are_refused_at_load(tmp_path: Path, path: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf'{path}: "{name}"'.replace("+", r"\+")):
        small_experiment(tmp_path, f"{path}={name}")


def test_without_a_critic_there_are_no_updates_of_one(tmp_path: Path) -> None:
    config = small_experiment(tmp_path, "algorithm.adv_estimator=remax", "actor.ppo_epochs=3")
    plan = plan_batches(config, 1)
    assert (plan.actor.optimizer_steps, plan.critic.optimizer_steps) == (6, 0)
    assert "critic" not in explain_batches(config, 1)
    assert not config.needs_critic


def test_the_critic_warms_up_alone(tmp_path: Path) -> None:
    config = small_experiment(tmp_path, "trainer.critic_warmup=2", "critic.ppo_epochs=4")
    plan = plan_batches(config, 1)
    assert plan.actor.optimizer_steps_of(3) == 2  # one step of two minibatches
    assert plan.critic.optimizer_steps_of(3) == 24
    assert "= 2 optimizer steps in a step of the run, after 2 steps without" in explain_batches(config, 1)
