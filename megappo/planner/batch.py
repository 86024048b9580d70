"""How a step's prompts become sequences, minibatches, data-parallel shares and micro-batches.

Which numbers are allowed is in `config/divisibility.py`; printing the plan is in `explain.py`.
"""

from dataclasses import dataclass, replace
from math import gcd

from megappo.config.divisibility import critic_epochs, critic_mini_batch, divisibility_problems
from megappo.config.experiment import ExperimentConfig
from megappo.config.passes import PassSize, actor_update, critic_update
from megappo.config.problem import raise_errors


@dataclass(frozen=True)
class MiniBatchPlan:
    """One role's cut of a step's sequences.

    `sequences` of one optimizer step over all ranks; `sequences_per_rank` of it on each data-parallel rank, in
    `num_micro_batches` forward-backward passes of `micro_batch` sequences; `num_minibatches` of them make one pass over
    the step's experience, and there are `epochs` passes, none in the run's first `idle_steps` steps. A role that is not
    built has 0 epochs. With `max_tokens` micro-batches are cut by tokens, and `num_micro_batches` is the most there can
    be.
    """

    sequences: int
    sequences_per_rank: int
    num_minibatches: int
    micro_batch: int
    num_micro_batches: int
    epochs: int
    idle_steps: int = 0
    max_tokens: int | None = None

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of this role in one step of the run."""
        return self.num_minibatches * self.epochs

    def optimizer_steps_of(self, total_steps: int) -> int:
        """Optimizer steps of this role in a run of so many steps."""
        return max(total_steps - self.idle_steps, 0) * self.optimizer_steps


@dataclass(frozen=True)
class BatchPlan:
    """The split of one PPO step.

    Sequences are numbered over the whole step: position = prompt · n + sample. A minibatch is a contiguous run of
    positions. Position s belongs to data-parallel rank (s // block) % dp, so that every minibatch of either role
    gives every rank the same number of sequences, and a rank's share of it is a contiguous run of its own, in order.
    """

    prompts: int
    n: int
    dp: int
    block: int
    actor: MiniBatchPlan
    critic: MiniBatchPlan

    @property
    def sequences(self) -> int:
        """Sequences of one step over all ranks."""
        return self.prompts * self.n

    @property
    def sequences_per_rank(self) -> int:
        """Sequences of one step on each data-parallel rank."""
        return self.sequences // self.dp

    @property
    def optimizer_steps_per_step(self) -> int:
        """Optimizer steps of the actor in one step of the run; the critic's are `critic.optimizer_steps`."""
        return self.actor.optimizer_steps

    @property
    def run(self) -> int:
        """Consecutive sequences that are in the same minibatch of either role: these can be dealt over ranks anew."""
        return gcd(self.actor.sequences, self.critic.sequences)

    def positions_of(self, dp_rank: int) -> tuple[int, ...]:
        """Positions that data-parallel rank `dp_rank` owns, rising.

        Example: 8 sequences, dp 2, block 2: rank 0 owns 0 1 4 5, rank 1 owns 2 3 6 7.
        """
        assert 0 <= dp_rank < self.dp, f"data-parallel rank {dp_rank} of {self.dp}"
        stride = self.block * self.dp
        starts = range(dp_rank * self.block, self.sequences, stride)
        return tuple(position for start in starts for position in range(start, start + self.block))


def plan_batches(config: ExperimentConfig, dp: int) -> BatchPlan:
    """The split of a PPO step over `dp` data-parallel ranks; raises ConfigError where the numbers don't divide."""
    raise_errors(divisibility_problems(config, dp))
    prompts, n = config.data.train_batch_size, config.rollout.n
    actor_sequences = config.actor.ppo_mini_batch_size * n
    critic_sequences = critic_mini_batch(config) * n if config.needs_critic else actor_sequences
    actor = _minibatches(prompts * n, actor_sequences, dp, actor_update(config), config.actor.ppo_epochs)
    passes = critic_epochs(config) if config.needs_critic else 0
    return BatchPlan(
        prompts=prompts,
        n=n,
        dp=dp,
        block=ownership_block(n, dp, actor_sequences, critic_sequences),
        actor=replace(actor, idle_steps=config.trainer.critic_warmup),
        critic=_minibatches(prompts * n, critic_sequences, dp, critic_update(config), passes),
    )


def plan_supervised(config: ExperimentConfig, dp: int) -> MiniBatchPlan:
    """The split of a supervised step: one optimizer step on `train_batch_size` sequences, in the actor's micro-batches.

    With preferences the numbers are those of pairs, each of two sequences.

    Raises ConfigError where the numbers don't divide.
    """
    raise_errors(divisibility_problems(config, dp))
    sequences = config.data.train_batch_size
    return _minibatches(sequences, sequences, dp, actor_update(config), epochs=1)


def ownership_block(n: int, dp: int, *minibatch_sequences: int) -> int:
    """Largest divisor of n that keeps a prompt's responses together and still divides every role's minibatch by dp."""
    return max(
        block
        for block in range(1, n + 1)
        if n % block == 0 and all(sequences % (block * dp) == 0 for sequences in minibatch_sequences)
    )


def _minibatches(step_sequences: int, sequences: int, dp: int, size: PassSize, epochs: int) -> MiniBatchPlan:
    per_rank = sequences // dp
    micro_batch = 1 if size.tokens is not None else size.sequences
    return MiniBatchPlan(
        sequences=sequences,
        sequences_per_rank=per_rank,
        num_minibatches=step_sequences // sequences,
        micro_batch=micro_batch,
        num_micro_batches=per_rank // micro_batch,
        epochs=epochs,
        max_tokens=size.tokens,
    )
