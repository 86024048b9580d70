"""Runs that end badly, or learn nothing on purpose: what the shell, the message and the run's folder say then."""

import signal
import time
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from megappo.errors import ExitCode
from tests.support.runs import Running, learning, megappo, metrics, reward, status, succeed, write_run_experiment

ENDLESS = ["trainer.total_steps=1000", "data.val_files=[]"]
LAYOUTS = {
    "tp1": [],
    "tp2+sp": ["layout.tp=2", "layout.sequence_parallel=true"],
    "pp2": ["layout.pp=2"],
    "cp2": ["layout.cp=2", "model.cp_comm_type=a2a", "model.use_remove_padding=true"],
}


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_experiment(tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_minibatch_a_step_is_exactly_on_policy(experiment: Path, tmp_path: Path, layout: str) -> None:
    """ρ = 1 in every update, though log-probs and updates cut their micro-batches differently; and it does learn."""
    succeed(
        "train", experiment, *LAYOUTS[layout], f"trainer.run_dir={tmp_path}", "trainer.total_steps=3",
        "actor.ppo_mini_batch_size=4", "actor.ppo_epochs=1", "critic.ppo_epochs=2", "data.val_files=[]",
        "actor.log_prob_micro_batch_size_per_gpu=4", "ref.log_prob_micro_batch_size_per_gpu=8",
        "critic.forward_micro_batch_size_per_gpu=1", "trainer.save_last=false",
    )  # fmt: skip
    lines = learning(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert abs(line["actor/ppo_kl"]) <= 1e-6 and line["actor/pg_clipfrac"] == 0.0, line
    assert lines[0]["kl/mean"] == pytest.approx(0.0, abs=1e-6) and abs(lines[2]["kl/mean"]) > 1e-5


def test_micro_batches_by_tokens_are_exactly_on_policy(experiment: Path, tmp_path: Path) -> None:
    """Log-probs and updates pack other sequences together, and the exact KL runs the reference on the actor's."""
    succeed(
        "train", experiment, f"trainer.run_dir={tmp_path}", "trainer.total_steps=2", "actor.ppo_mini_batch_size=4",
        "actor.ppo_epochs=1", "model.use_remove_padding=true", "actor.use_dynamic_bsz=true", "data.val_files=[]",
        "actor.ppo_micro_batch_size_per_gpu=null", "actor.ppo_max_token_len_per_gpu=40",
        "actor.log_prob_max_token_len_per_gpu=80", "ref.log_prob_max_token_len_per_gpu=33",
        "actor.kl_loss_type=full", "trainer.save_last=false",
    )  # fmt: skip
    lines = [line for line in metrics(tmp_path) if line["step"]]
    assert len(lines) == 2
    for line in lines:
        assert abs(line["actor/ppo_kl"]) <= 1e-6 and line["actor/pg_clipfrac"] == 0.0, line
        assert 3 <= line["actor/micro_batches"] < 8 and line["actor/grad_norm"] > 1e-3
    assert lines[0]["kl/mean"] == pytest.approx(0.0, abs=1e-6)


def test_rate_0_changes_no_weight(experiment: Path, tmp_path: Path) -> None:
    """Two minibatches, two epochs, two steps: every update is on-policy, and the export is the model to the bit."""
    succeed(
        "train", experiment, "layout.tp=2", f"trainer.run_dir={tmp_path}", "trainer.total_steps=2",
        "actor.optim.lr=0", "critic.optim.lr=0", "trainer.export_hf=true", "data.val_files=[]",
    )  # fmt: skip
    for line in learning(tmp_path):
        assert abs(line["actor/ppo_kl"]) <= 1e-6 and line["actor/pg_clipfrac"] == 0.0
        assert line["actor/grad_norm"] > 1e-3 and line["actor/lr"] == 0.0
    before = load_file(experiment.parent / "model" / "model.safetensors")
    after = load_file(tmp_path / "hf" / "latest" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_ctrl_c_ends_all_ranks_in_the_middle_of_a_step(experiment: Path, tmp_path: Path) -> None:
    running = Running(
        "train", experiment, "layout.dp=2", *ENDLESS, f"trainer.run_dir={tmp_path}", "trainer.save_freq=1"
    )
    running.wait_for_step(tmp_path, 2)
    family = running.family()
    assert len(family) >= 3 and status(tmp_path)["state"] == "running"
    begin = time.monotonic()
    running.process.send_signal(signal.SIGINT)
    ended = running.finish()
    assert time.monotonic() - begin < 10
    assert ended.code == ExitCode.FAILED
    assert "interrupted; the last checkpoint is " in ended.err and "go on from it with --resume" in ended.err
    assert_gone(family)
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("failed", 1)


def test_killed_rank_ends_the_others_and_is_named(experiment: Path, tmp_path: Path) -> None:
    running = Running("train", experiment, "layout.tp=2", *ENDLESS, f"trainer.run_dir={tmp_path}")
    running.wait_for_step(tmp_path, 1)
    family = running.family()
    begin = time.monotonic()
    running.rank(1).kill()
    ended = running.finish()
    assert time.monotonic() - begin < 10
    assert ended.code == ExitCode.FAILED
    assert "rank 1 was killed by SIGKILL; the system does that when memory runs out" in ended.err
    assert "Traceback" not in ended.err, "the peer that lost it has nothing to add"
    assert_gone(family)
    assert status(tmp_path)["state"] == "failed" and status(tmp_path)["step"] >= 1


def test_error_of_one_rank_is_the_one_that_is_shown(experiment: Path, tmp_path: Path) -> None:
    broken = "reward.parts=[{name: one, kind: function, function: 'tests.distributed.programs.broken_rank:score'}]"
    ended = megappo("train", experiment, "layout.tp=2", *ENDLESS, broken, f"trainer.run_dir={tmp_path}")
    assert ended.code == ExitCode.FAILED
    assert "rank 1 failed:\nTraceback (most recent call last):" in ended.err
    assert ended.err.rstrip().endswith("ValueError: the second rank alone went wrong")
    assert ended.err.count("Traceback") == 1 and "rank 0 failed" not in ended.err
    assert (status(tmp_path)["state"], status(tmp_path)["step"], status(tmp_path)["exit_code"]) == ("failed", 0, 1)


def test_bug_in_a_reward_stops_with_its_traceback(experiment: Path, tmp_path: Path) -> None:
    """The samples of rank 1 alone fail: the error is told whichever rank is heard first."""
    broken = reward("buggy_for_second_half")
    allowed = "reward.max_failed_fraction=0.25"
    ended = megappo("train", experiment, "layout.dp=2", *ENDLESS, broken, allowed, f"trainer.run_dir={tmp_path}")
    assert ended.code == ExitCode.BAD_INPUT
    said = (
        "error: rewards failed on 4 of 8 samples, more than reward.max_failed_fraction=0.25 allows; the first, of part"
    )
    assert said in ended.err
    assert 'return lengths["long"]' in ended.err and ended.err.rstrip().endswith("KeyError: 'long'")
    assert ended.err.count("Traceback") == 1
    assert (status(tmp_path)["state"], status(tmp_path)["step"], status(tmp_path)["exit_code"]) == ("failed", 0, 2)


def assert_gone(family: list[psutil.Process]) -> None:
    """No process of the run is left; one that was just killed has a moment."""
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
