"""Which batch sizes divide: prompts into minibatches, these over data-parallel ranks, these into micro-batches.

The split that follows from allowed numbers is in `planner/batch.py`.
"""

from collections.abc import Callable

from megappo.config.experiment import ExperimentConfig
from megappo.config.problem import Problem


def critic_mini_batch(config: ExperimentConfig) -> int:
    """Prompts of one optimizer step of the critic."""
    return config.critic.ppo_mini_batch_size or config.actor.ppo_mini_batch_size


def critic_micro_batch(config: ExperimentConfig) -> int:
    """Sequences of one forward-backward pass of the critic on a rank."""
    return config.critic.ppo_micro_batch_size_per_gpu or config.actor.micro_batch


def critic_epochs(config: ExperimentConfig) -> int:
    """The critic's passes over a step's sequences."""
    return config.critic.ppo_epochs or config.actor.ppo_epochs


def divisibility_problems(config: ExperimentConfig, dp: int) -> list[Problem]:
    """Every batch size that does not divide over `dp` data-parallel ranks, with the nearest that do.

    Passes without an update have no rule: their last micro-batch may be smaller.
    """
    if config.trainer.kind != "ppo":
        return _supervised_problems(config, dp)
    problems = _mini_batch_problems(
        config, dp, "actor.ppo_mini_batch_size", config.actor.ppo_mini_batch_size
    ) or _micro_batch_problems(
        config, dp, "actor.ppo_micro_batch_size_per_gpu", config.actor.micro_batch,
        config.actor.ppo_mini_batch_size, is_dynamic=config.actor.use_dynamic_bsz,
    )  # fmt: skip
    has_own = config.critic.ppo_mini_batch_size or config.critic.ppo_micro_batch_size_per_gpu
    if config.needs_critic and has_own:
        problems += _critic_problems(config, dp)
    return problems


def nearest(wanted: int, lowest: int, highest: int, fits: Callable[[int], bool]) -> list[int]:
    """The nearest numbers below and above `wanted`, within the bounds, for which `fits` is true."""
    below = next((number for number in range(min(wanted, highest + 1) - 1, lowest - 1, -1) if fits(number)), None)
    above = next((number for number in range(max(wanted, lowest - 1) + 1, highest + 1) if fits(number)), None)
    return [number for number in (below, above) if number is not None]


def choices(numbers: list[int]) -> str:
    """`nearest that do: 4 or 8`."""
    return "nearest that can: " + " or ".join(map(str, numbers))


def _mini_batch_problems(config: ExperimentConfig, dp: int, path: str, mini: int) -> list[Problem]:
    prompts, n = config.data.train_batch_size, config.rollout.n
    if prompts % mini == 0 and (mini * n) % dp == 0:
        return []
    fitting = nearest(mini, 1, prompts, lambda size: prompts % size == 0 and (size * n) % dp == 0)
    if not fitting:  # no minibatch of this many prompts can be split over dp: the step itself has to change
        allowed = nearest(prompts, 1, prompts + dp, lambda size: (size * n) % dp == 0)
        reason = f"times rollout.n {n} gives {prompts * n} sequences, which don't divide over dp {dp}"
        return [Problem("data.train_batch_size", str(prompts), reason, choices(allowed))]
    if prompts % mini:
        reason = f"does not divide data.train_batch_size {prompts}"
    else:
        reason = f"times rollout.n {n} gives {mini * n} sequences, which don't divide over dp {dp}"
    return [Problem(path, str(mini), reason, choices(fitting))]


def _micro_batch_problems(
    config: ExperimentConfig, dp: int, path: str, micro: int, mini: int, *, is_dynamic: bool
) -> list[Problem]:
    per_rank = mini * config.rollout.n // dp
    if is_dynamic:
        return []
    if per_rank % micro == 0:
        return _virtual_problems(config, path, micro, per_rank)
    reason = f"does not divide the {per_rank} sequences that a minibatch has on each of {dp} data-parallel ranks"
    return [Problem(path, str(micro), reason, choices(nearest(micro, 1, per_rank, lambda size: per_rank % size == 0)))]


def _virtual_problems(config: ExperimentConfig, path: str, micro: int, per_rank: int) -> list[Problem]:
    """Virtual stages take turns with `pp` micro-batches each (Megatron's interleaved schedule)."""
    pp, vpp, number = config.layout.pp, config.layout.vpp, per_rank // micro
    if vpp == 1 or number % pp == 0:
        return []
    reason = (
        f"makes {number} micro-batches of the {per_rank} sequences that a step of the optimizer has on a rank, and "
        f"layout.vpp {vpp} needs a multiple of pp {pp}"
    )
    fitting = nearest(micro, 1, per_rank, lambda size: per_rank % (size * pp) == 0)
    remedy = choices(fitting) if fitting else "set layout.vpp to 1, or make the minibatch larger"
    return [Problem(path, str(micro), reason, remedy)]


def _critic_problems(config: ExperimentConfig, dp: int) -> list[Problem]:
    mini, micro = critic_mini_batch(config), critic_micro_batch(config)
    mini_path = _own_path(config, "ppo_mini_batch_size")
    micro_path = _own_path(config, "ppo_micro_batch_size_per_gpu")
    if mini_path.startswith("critic."):
        mini_problems = _mini_batch_problems(config, dp, mini_path, mini)
        if mini_problems:
            return mini_problems
    return _micro_batch_problems(config, dp, micro_path, micro, mini, is_dynamic=config.critic_is_dynamic)


def _own_path(config: ExperimentConfig, leaf: str) -> str:
    """Path of the critic's leaf, or of the actor's that it takes over where its own is null."""
    return f"critic.{leaf}" if getattr(config.critic, leaf) is not None else f"actor.{leaf}"


def _supervised_problems(config: ExperimentConfig, dp: int) -> list[Problem]:
    sequences, micro = config.data.train_batch_size, config.actor.micro_batch
    if sequences % dp:
        allowed = nearest(sequences, 1, sequences + dp, lambda size: size % dp == 0)
        reason = f"does not divide over dp {dp}"
        return [Problem("data.train_batch_size", str(sequences), reason, choices(allowed))]
    per_rank = sequences // dp
    if per_rank % micro:
        path = "actor.ppo_micro_batch_size_per_gpu"
        reason = f"does not divide the {per_rank} sequences of a step on each of {dp} data-parallel ranks"
        remedy = choices(nearest(micro, 1, per_rank, lambda size: per_rank % size == 0))
        return [Problem(path, str(micro), reason, remedy)]
    return _virtual_problems(config, "actor.ppo_micro_batch_size_per_gpu", micro, per_rank)
