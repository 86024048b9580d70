"""What packed and dynamic micro-batches refuse, and how validate prints them."""
# ruff: noqa: E501  a line of a table is one case, with the whole message

from pathlib import Path

import pytest

from megappo.config.checks import check_experiment
from megappo.config.passes import actor_forward, actor_update, critic_forward, critic_update, reference_forward
from megappo.config.problem import Severity
from megappo.planner.batch import plan_batches
from megappo.planner.explain import explain_batches
from tests.support.experiments import small_experiment

PACKED = "model.use_remove_padding=true"
DYNAMIC = (PACKED, "actor.use_dynamic_bsz=true")


def problems(folder: Path, *overrides: str) -> list[str]:
    return [
        f"{'error' if problem.severity is Severity.ERROR else 'warning'} {problem.text()}"
        for problem in check_experiment(small_experiment(folder, *overrides))
    ]


@pytest.mark.parametrize(
    "overrides",
    [(PACKED,), DYNAMIC, (*DYNAMIC, "actor.ppo_max_token_len_per_gpu=32", "critic.use_dynamic_bsz=false"),
     (PACKED, "critic.use_dynamic_bsz=true", "critic.ppo_max_token_len_per_gpu=64")],
)  # fmt: skip
def test_sound(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    assert problems(tmp_path, *overrides) == []


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("actor.use_dynamic_bsz=true",), "error actor.use_dynamic_bsz: true: counts tokens without padding, and model.use_remove_padding is false; set that to true, or this to false"),
        (("critic.use_dynamic_bsz=true",), "error critic.use_dynamic_bsz: true: counts tokens without padding"),
        ((*DYNAMIC, "actor.ppo_micro_batch_size_per_gpu=2"), "error actor.ppo_micro_batch_size_per_gpu: 2: counts sequences, and actor.use_dynamic_bsz cuts micro-batches by tokens; null, or set that to false"),
        ((*DYNAMIC, "critic.forward_micro_batch_size_per_gpu=2"), "error critic.forward_micro_batch_size_per_gpu: 2: counts sequences, and actor.use_dynamic_bsz cuts"),
        ((*DYNAMIC, "actor.use_kl_loss=true", "ref.log_prob_micro_batch_size_per_gpu=4"), "error ref.log_prob_micro_batch_size_per_gpu: 4: counts sequences"),
        ((*DYNAMIC, "actor.ppo_max_token_len_per_gpu=31"), "error actor.ppo_max_token_len_per_gpu: 31: a sequence can have 32 tokens (data.max_prompt_length 16 + data.max_response_length 16), and none is cut; at least 32"),
        ((*DYNAMIC, "critic.forward_max_token_len_per_gpu=8"), "error critic.forward_max_token_len_per_gpu: 8: a sequence can have 32 tokens"),
        ((*DYNAMIC, "layout.tp=3", "layout.sequence_parallel=true", "actor.ppo_max_token_len_per_gpu=32"), "error actor.ppo_max_token_len_per_gpu: 32: a sequence can have 32 tokens (data.max_prompt_length 16 + data.max_response_length 16), and none is cut; at least 33"),
        (("trainer.kind=sft", "reward=null", *DYNAMIC), "error actor.use_dynamic_bsz: true: micro-batches by tokens are for trainer.kind ppo, and this is sft; set it to false"),
        (("actor.ppo_max_token_len_per_gpu=64",), "warning actor.ppo_max_token_len_per_gpu: 64: does nothing, for actor.use_dynamic_bsz is false; set that to true, or leave it out"),
        (("trainer.kind=sft", "reward=null", "actor.log_prob_max_token_len_per_gpu=64"), "warning actor.log_prob_max_token_len_per_gpu: 64: does nothing, for trainer.kind sft cuts micro-batches by sequences; leave it out"),
        ((*DYNAMIC, "algorithm.adv_estimator=remax", "critic.ppo_max_token_len_per_gpu=64"), "warning critic.ppo_max_token_len_per_gpu: 64: does nothing, for this run has no critic; leave it out"),
        ((*DYNAMIC, "ref.log_prob_max_token_len_per_gpu=64"), "warning ref.log_prob_max_token_len_per_gpu: 64: does nothing, for this run has no reference; leave it out"),
        (("actor.use_kl_loss=true", "model.lora.rank=4", "ref.log_prob_max_token_len_per_gpu=64"), "warning ref.log_prob_max_token_len_per_gpu: 64: does nothing, for actor.use_dynamic_bsz is false; set that to true, or leave it out"),
        (("critic.ppo_max_token_len_per_gpu=64",), "warning critic.ppo_max_token_len_per_gpu: 64: does nothing, for actor.use_dynamic_bsz is false"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, overrides: tuple[str, ...], expected: str) -> None:
    assert any(text.startswith(expected) for text in problems(tmp_path, *overrides)), problems(tmp_path, *overrides)


def test_limits_are_inherited(tmp_path: Path) -> None:
    config = small_experiment(tmp_path, *DYNAMIC, "actor.ppo_max_token_len_per_gpu=100")
    passes = (actor_update, actor_forward, reference_forward, critic_update, critic_forward)
    assert [size(config).tokens for size in passes] == [100] * 5
    config = small_experiment(
        tmp_path, *DYNAMIC, "actor.log_prob_max_token_len_per_gpu=200", "critic.ppo_max_token_len_per_gpu=300"
    )
    assert [size(config).tokens for size in passes] == [16384, 200, 200, 300, 300]
    config = small_experiment(tmp_path, "actor.ppo_micro_batch_size_per_gpu=3", "critic.ppo_micro_batch_size_per_gpu=2")
    assert [(size(config).sequences, size(config).tokens) for size in passes] == [
        (3, None), (3, None), (3, None), (2, None), (2, None),
    ]  # fmt: skip


def test_the_split_in_words(tmp_path: Path) -> None:
    """11 sequences a rank would not divide into micro-batches of 2; tokens need no divisor."""
    config = small_experiment(tmp_path, *DYNAMIC, "actor.ppo_max_token_len_per_gpu=64", "rollout.n=4")
    plan = plan_batches(config, 2)
    assert (plan.actor.max_tokens, plan.actor.sequences_per_rank, plan.run) == (64, 12, 24)
    line = "a minibatch on each data-parallel rank: 12 sequences in micro-batches of at most 64 tokens"
    assert explain_batches(config, 2).count(line) == 2
    # A sequence is cut over the context-parallel ranks: a micro-batch has as many tokens on each of them.
    config = small_experiment(tmp_path, *DYNAMIC, "actor.ppo_max_token_len_per_gpu=64", "rollout.n=4", "layout.cp=2")
    assert explain_batches(config, 2).count("12 sequences in micro-batches of at most 128 tokens") == 2
