"""What a warning says does nothing does nothing: a run with all such settings changed has the same numbers."""

from pathlib import Path

from megappo.config.checks import check_experiment
from megappo.config.load import load_experiment
from tests.support.runs import learning, succeed, write_run_experiment

RUN = [
    "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false", "actor.use_kl_loss=false",
    "trainer.total_steps=2", "trainer.save_last=false", "data.val_files=[]", "observe.samples_freq=0", "layout.dp=1",
]  # fmt: skip
UNREAD = {
    "algorithm.kl_ctrl.kl_coef": "0.3", "algorithm.kl_ctrl.target_kl": "0.2", "algorithm.kl_ctrl.horizon": "5",
    "algorithm.filter_groups.metric": "sum", "algorithm.filter_groups.max_num_gen_batches": "1",
    "algorithm.filter_groups.when_short": "fill",
    "actor.kl_loss_coef": "0.4", "actor.kl_loss_type": "k2",
    "actor.optim.overlap_grad_reduce": "true", "actor.optim.overlap_param_gather": "true",
    "critic.optim.lr": "0.5", "critic.optim.betas": "[0.1, 0.2]", "critic.optim.weight_decay": "0.3",
    "critic.ppo_mini_batch_size": "4", "critic.ppo_micro_batch_size_per_gpu": "1",
    "critic.forward_micro_batch_size_per_gpu": "1", "critic.lora.rank": "4", "critic.cliprange_value": "0.1",
    "critic.offload.params": "true",
    "ref.log_prob_micro_batch_size_per_gpu": "1", "ref.offload.params": "true",
    "dpo.beta": "0.7", "dpo.loss_type": "ipo",
    "replay.fraction": "0.25", "replay.filtration": "uniform", "replay.power": "3", "replay.storage": "disk",
    "rollout.multi_turn.max_turns": "2", "rollout.multi_turn.max_tokens_per_turn": "2",
    "reward.overlong_buffer.len": "4", "reward.overlong_buffer.penalty_factor": "2",
    "observe.samples_per_step": "3", "trainer.balance_batch": "false",
}  # fmt: skip


def test_settings_that_nothing_reads_change_no_number(tmp_path: Path) -> None:
    file = write_run_experiment(tmp_path)
    changes = [f"{path}={value}" for path, value in UNREAD.items()]
    told = {problem.path: problem.text() for problem in check_experiment(load_experiment(file, [*RUN, *changes]), 1)}
    assert set(told) >= set(UNREAD), "each of them is told"
    assert all("does nothing" in text for text in told.values())
    found = {}
    for name, overrides in (("plain", []), ("changed", changes)):
        succeed("train", file, *RUN, *overrides, f"trainer.run_dir={tmp_path}/{name}")
        found[name] = learning(tmp_path / name)
    assert [line["step"] for line in found["plain"]] == [1, 2] and len(found["plain"][0]) > 20
    assert found["changed"] == found["plain"]
