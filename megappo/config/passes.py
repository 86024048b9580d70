"""How much of a batch a role takes in one forward pass: so many sequences, or so many tokens. Every null resolved."""

from dataclasses import dataclass

from megappo.config.divisibility import critic_micro_batch
from megappo.config.experiment import ExperimentConfig


@dataclass(frozen=True)
class PassSize:
    """A micro-batch of one kind of pass: at most `tokens` tokens where micro-batches are dynamic, else `sequences`
    sequences. `path` is the setting that the tokens come from."""

    sequences: int
    tokens: int | None
    path: str


def actor_update(config: ExperimentConfig) -> PassSize:
    actor = config.actor
    tokens = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None
    return PassSize(actor.micro_batch, tokens, "actor.ppo_max_token_len_per_gpu")


def actor_forward(config: ExperimentConfig) -> PassSize:
    """The pass of old log-probs."""
    sizes, own = actor_update(config), config.actor.log_prob_max_token_len_per_gpu
    if sizes.tokens is None or own is None:
        return PassSize(config.actor.log_prob_micro_batch, sizes.tokens, sizes.path)
    return PassSize(config.actor.log_prob_micro_batch, own, "actor.log_prob_max_token_len_per_gpu")


def reference_forward(config: ExperimentConfig) -> PassSize:
    """Its sizes, else those of the actor's pass of old log-probs."""
    sequences = config.ref.log_prob_micro_batch_size_per_gpu or config.actor.log_prob_micro_batch
    if not config.reference_is_dynamic:
        return PassSize(sequences, None, "")
    own, actor = config.ref.log_prob_max_token_len_per_gpu, config.actor.log_prob_max_token_len_per_gpu
    if own is not None:
        return PassSize(sequences, own, "ref.log_prob_max_token_len_per_gpu")
    if actor is not None:
        return PassSize(sequences, actor, "actor.log_prob_max_token_len_per_gpu")
    return PassSize(sequences, config.actor.ppo_max_token_len_per_gpu, "actor.ppo_max_token_len_per_gpu")


def critic_update(config: ExperimentConfig) -> PassSize:
    """The critic's updates; a limit that is not set is the actor's."""
    sequences, own = critic_micro_batch(config), config.critic.ppo_max_token_len_per_gpu
    if not config.critic_is_dynamic:
        return PassSize(sequences, None, "")
    if own is not None:
        return PassSize(sequences, own, "critic.ppo_max_token_len_per_gpu")
    return PassSize(sequences, config.actor.ppo_max_token_len_per_gpu, "actor.ppo_max_token_len_per_gpu")


def critic_forward(config: ExperimentConfig) -> PassSize:
    """The pass of values."""
    sizes, own = critic_update(config), config.critic.forward_max_token_len_per_gpu
    sequences = config.critic.forward_micro_batch_size_per_gpu or sizes.sequences
    if sizes.tokens is None or own is None:
        return PassSize(sequences, sizes.tokens, sizes.path)
    return PassSize(sequences, own, "critic.forward_max_token_len_per_gpu")
