"""Settings of parts that a run does not have: each message, and that nothing is told of what is at its default or read."""
# ruff: noqa: E501  a line of a table is one case, with the whole message

from pathlib import Path

import pytest

from megappo.config.checks import check_experiment
from megappo.config.experiment import ExperimentConfig
from megappo.config.load import load_experiment, to_yaml
from megappo.config.messages import known_keys
from tests.support.experiments import write_experiment


def found(folder: Path, *overrides: str, ranks: int | None = None) -> list[str]:
    config = load_experiment(write_experiment(folder), overrides)
    return [f"{problem.severity.value} {problem.text()}" for problem in check_experiment(config, ranks)]


GRPO = ["algorithm.adv_estimator=grpo", "rollout.n=2"]
REMAX = "algorithm.adv_estimator=remax"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([REMAX, "critic.optim.lr=0.1"], "critic.optim.lr: 0.1: does nothing, for algorithm.adv_estimator remax has no critic; leave it out"),
        ([REMAX, "critic.optim.betas=[0.9, 0.99]"], "critic.optim.betas: [0.9, 0.99]: does nothing, for algorithm.adv_estimator remax has no critic; leave it out"),
        ([REMAX, "critic.optim.overlap_param_gather=true"], "critic.optim.overlap_param_gather: true: does nothing, for algorithm.adv_estimator remax has no critic; leave it out"),
        ([REMAX, "critic.ppo_mini_batch_size=5"], "critic.ppo_mini_batch_size: 5: does nothing, for algorithm.adv_estimator remax has no critic; leave it out"),
        (["trainer.kind=sft", "critic.ppo_epochs=2"], "critic.ppo_epochs: 2: does nothing, for trainer.kind sft has no critic; leave it out"),
        (["trainer.kind=sft", "algorithm.gamma=0.9"], "algorithm.gamma: 0.9: does nothing, for trainer.kind is sft; leave it out"),
        (["trainer.kind=reward_model", "actor.policy_loss.loss_mode=gspo"], 'actor.policy_loss.loss_mode: "gspo": does nothing, for trainer.kind is reward_model; leave it out'),
        (["trainer.kind=dpo", "actor.entropy_coeff=0.1"], "actor.entropy_coeff: 0.1: does nothing, for trainer.kind is dpo; leave it out"),
        (["dpo.beta=0.2"], "dpo.beta: 0.2: does nothing, for trainer.kind is ppo; leave it out"),
        (["ref.log_prob_micro_batch_size_per_gpu=2"], "ref.log_prob_micro_batch_size_per_gpu: 2: does nothing, for this run has no reference; leave it out"),
        (["actor.kl_loss_coef=0.1"], "actor.kl_loss_coef: 0.1: does nothing, for actor.use_kl_loss is false; set that to true, or leave it out"),
        (["algorithm.use_kl_in_reward=true", "actor.kl_loss_type=k1"], 'actor.kl_loss_type: "k1": does nothing, for actor.use_kl_loss is false; set that to true, or leave it out'),
        (["actor.use_kl_loss=true", "algorithm.kl_ctrl.kl_coef=0.1"], "algorithm.kl_ctrl.kl_coef: 0.1: does nothing, for algorithm.use_kl_in_reward is false; set that to true, or leave it out"),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.horizon=50"], "algorithm.kl_ctrl.horizon: 50: does nothing, for algorithm.kl_ctrl.type is fixed; set that to adaptive, or leave it out"),
        ([*GRPO, "algorithm.filter_groups.metric=correct"], 'algorithm.filter_groups.metric: "correct": does nothing, for algorithm.filter_groups.enable is false; set that to true, or leave it out'),
        (["rollout.multi_turn.max_turns=2"], "rollout.multi_turn.max_turns: 2: does nothing, for rollout.multi_turn.enable is false; set that to true, or leave it out"),
        (["reward.overlong_buffer.len=4"], "reward.overlong_buffer.len: 4: does nothing, for reward.overlong_buffer.enable is false; set that to true, or leave it out"),
        (["observe.samples_freq=0", "observe.samples_per_step=4"], "observe.samples_per_step: 4: does nothing, for observe.samples_freq is 0; set that, or leave it out"),
        (["replay.fraction=0.25"], "replay.fraction: 0.25: does nothing, for replay.size is 0 and there are no replay.pairs; set the size, or leave it out"),
        (["replay.size=8", "replay.filtration=uniform", "replay.power=3"], "replay.power: 3.0: does nothing, for replay.filtration is uniform; set that to power, or leave it out"),
        (["replay.pairs=[F/train.jsonl]", "replay.storage=disk"], 'replay.storage: "disk": does nothing, for replay.pairs are drawn from evenly, and are no buffer; leave it out'),
        (["layout.dp=1", "trainer.balance_batch=false"], "trainer.balance_batch: false: does nothing, for there is one data-parallel rank; leave it out"),
        (["layout.dp=1", "actor.optim.overlap_grad_reduce=true"], "actor.optim.overlap_grad_reduce: true: does nothing, for there is one data-parallel rank, with nothing to send; leave it out"),
    ],
)  # fmt: skip
def test_each_message(tmp_path: Path, overrides: list[str], expected: str) -> None:
    assert found(tmp_path, *(word.replace("F/", f"{tmp_path}/") for word in overrides)) == [f"warning {expected}"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["critic.optim.lr=0.1", "critic.ppo_micro_batch_size_per_gpu=2"],
        ["trainer.kind=dpo", "reward=null", "dpo.beta=0.2", "ref.log_prob_micro_batch_size_per_gpu=2"],
        ["actor.use_kl_loss=true", "actor.kl_loss_coef=0.1", "actor.kl_loss_type=k1"],
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.1, target_kl: 0.2, horizon: 5}"],
        ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.1", "ref.log_prob_micro_batch_size_per_gpu=2"],
        [*GRPO, "algorithm.filter_groups={enable: true, metric: correct, when_short: fill}"],
        ["reward.overlong_buffer={enable: true, len: 4}"],
        ["replay={size: 8, fraction: 0.25, power: 3, storage: disk}"],
        ["layout.dp=2", "trainer.balance_batch=false", "actor.optim.overlap_grad_reduce=true"],
        # The number of data-parallel ranks is not known, or others have copies of weights.
        ["trainer.balance_batch=false", "actor.optim.overlap_grad_reduce=true"],
        ["layout.dp=1", "layout.cp=2", "actor.optim.overlap_grad_reduce=true"],
    ],
)  # fmt: skip
def test_what_is_read_is_not_told(tmp_path: Path, overrides: list[str]) -> None:
    assert found(tmp_path, *overrides) == []


@pytest.mark.parametrize("kind", ["ppo", "sft", "dpo", "reward_model"])
def test_nothing_is_told_of_defaults_that_are_written_out(tmp_path: Path, kind: str) -> None:
    """As in the resolved file that a run leaves, which sets everything."""
    overrides = [f"trainer.kind={kind}", *([REMAX] if kind == "ppo" else []), "layout.dp=1"]
    config = load_experiment(write_experiment(tmp_path), overrides)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(to_yaml(config))
    text = resolved.read_text()
    assert all(f"{name}:" in text for name in ("reshard_after_forward", "alpha", "kl_loss_coef", "penalty_factor"))
    assert check_experiment(load_experiment(resolved), 1) == check_experiment(config, 1) == []


def test_a_setting_is_told_once(tmp_path: Path) -> None:
    keys = set(known_keys(ExperimentConfig))
    overrides = [
        REMAX,
        "critic.path=nowhere",
        "critic.cliprange_value=0.1",
        "critic.offload.grads=true",
        "critic.fsdp.enable=true",
        "ref.path=nowhere",
    ]
    paths = [line.split(" ")[1].rstrip(":") for line in found(tmp_path, *overrides)]
    assert sorted(paths) == sorted(word.partition("=")[0] for word in overrides if word != REMAX)
    assert set(paths) <= keys
