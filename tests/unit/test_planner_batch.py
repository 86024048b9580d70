"""The split of a step, against hand arithmetic and the properties that the loop relies on."""

import itertools
from pathlib import Path

import pytest

from megappo.errors import ConfigError
from megappo.planner.batch import MiniBatchPlan, ownership_block, plan_batches, plan_supervised
from megappo.planner.explain import explain_batches
from tests.support.experiments import small_experiment


def test_a_step_by_hand(tmp_path: Path) -> None:
    config = small_experiment(
        tmp_path, "rollout.n=4", "actor.ppo_epochs=3", "actor.ppo_micro_batch_size_per_gpu=2",
        "critic.ppo_mini_batch_size=3", "critic.ppo_epochs=1",
    )  # fmt: skip
    plan = plan_batches(config, dp=2)
    assert (plan.sequences, plan.sequences_per_rank, plan.block) == (48, 24, 2)  # 3·4 = 12 divides by 2·2, not by 4·2
    assert plan.actor == MiniBatchPlan(24, 12, num_minibatches=2, micro_batch=2, num_micro_batches=6, epochs=3)
    assert plan.critic == MiniBatchPlan(12, 6, num_minibatches=4, micro_batch=2, num_micro_batches=3, epochs=1)
    assert (plan.optimizer_steps_per_step, plan.critic.optimizer_steps) == (6, 4)
    assert plan.positions_of(0)[:8] == (0, 1, 4, 5, 8, 9, 12, 13)
    assert plan.positions_of(1)[:8] == (2, 3, 6, 7, 10, 11, 14, 15)


@pytest.mark.parametrize(
    ("n", "dp", "minibatches", "block"),
    [(4, 2, (24, 24), 4), (4, 2, (24, 12), 2), (4, 2, (24, 6), 1), (3, 4, (12, 12), 3), (1, 8, (64, 8), 1)],
)
def test_ownership_block(n: int, dp: int, minibatches: tuple[int, int], block: int) -> None:
    assert ownership_block(n, dp, *minibatches) == block


def test_every_minibatch_is_shared_equally_in_runs(tmp_path: Path) -> None:
    for n, dp, critic in itertools.product((1, 2, 4, 6), (1, 2, 3, 6), (2, 3, 6, 12)):
        config = small_experiment(tmp_path, f"rollout.n={n}", f"critic.ppo_mini_batch_size={critic}")
        if (6 * n) % dp or (critic * n) % dp:
            with pytest.raises(ConfigError, match="don't divide over dp"):
                plan_batches(config, dp)
            continue
        plan = plan_batches(config, dp)
        owned = [plan.positions_of(rank) for rank in range(dp)]
        assert sorted(itertools.chain(*owned)) == list(range(12 * n))
        for role in (plan.actor, plan.critic):
            for start, rank in itertools.product(range(0, plan.sequences, role.sequences), range(dp)):
                inside = [i for i, s in enumerate(owned[rank]) if start <= s < start + role.sequences]
                minibatch = start // role.sequences
                first = minibatch * role.sequences_per_rank
                assert inside == list(range(first, first + role.sequences_per_rank))


def test_supervised_step(tmp_path: Path) -> None:
    config = small_experiment(tmp_path, "trainer.kind=sft", "reward=null", "actor.ppo_micro_batch_size_per_gpu=3")
    assert plan_supervised(config, dp=2) == MiniBatchPlan(12, 6, 1, micro_batch=3, num_micro_batches=2, epochs=1)
    with pytest.raises(ConfigError, match="does not divide over dp 5"):
        plan_supervised(config, dp=5)


def test_explanation_in_words(tmp_path: Path) -> None:
    config = small_experiment(tmp_path, "rollout.n=4", "layout.tp=3", "layout.sequence_parallel=true")
    assert explain_batches(config, dp=2).splitlines() == [
        "step    12 prompts × 4 responses = 48 sequences",
        "ranks   2 data-parallel ranks have 24 sequences each; blocks of 4 go to the ranks in turn",
        "actor   48 sequences = 2 minibatches of 24 (6 prompts × 4)",
        "        a minibatch on each data-parallel rank: 12 sequences = 12 micro-batches of 1",
        "        2 minibatches × 1 pass = 2 optimizer steps in a step of the run",
        "critic  48 sequences = 2 minibatches of 24 (6 prompts × 4)",
        "        a minibatch on each data-parallel rank: 12 sequences = 12 micro-batches of 1",
        "        2 minibatches × 1 pass = 2 optimizer steps in a step of the run",
        "length  16 prompt + 16 response = 32 tokens at most",
        "layout  tp 3 · pp 1 · dp 2 = 6 ranks, sequences padded to multiples of 3",
    ]
