"""Rules about packed and dynamic micro-batches: what excludes each other, and token limits that hold no sequence."""

from collections.abc import Iterator

from megappo.config.checks_memory import missing_role
from megappo.config.experiment import ExperimentConfig
from megappo.config.passes import (
    PassSize,
    actor_forward,
    actor_update,
    critic_forward,
    critic_update,
    reference_forward,
)
from megappo.config.problem import Problem, Severity, typed

SEQUENCE_SIZES = {
    "actor": ("ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu"),
    "critic": ("ppo_micro_batch_size_per_gpu", "forward_micro_batch_size_per_gpu"),
    "ref": ("log_prob_micro_batch_size_per_gpu",),
}
TOKEN_LIMITS = {
    "actor": ("ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu"),
    "critic": ("ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu"),
    "ref": ("log_prob_max_token_len_per_gpu",),
}
SWITCHES = {"actor": "use_dynamic_bsz", "critic": "use_dynamic_bsz", "ref": "log_prob_use_dynamic_bsz"}


def packing_problems(config: ExperimentConfig) -> list[Problem]:
    """Of `model.use_remove_padding`, `use_dynamic_bsz` and the sizes that go with it."""
    switched = [role for role in SWITCHES if getattr(getattr(config, role), SWITCHES[role])]
    if config.trainer.kind != "ppo":
        reason = f"micro-batches by tokens are for trainer.kind ppo, and this is {config.trainer.kind}"
        return [
            *(Problem(f"{role}.{SWITCHES[role]}", "true", reason, "set it to false") for role in switched),
            *_idle(config),
        ]
    if not config.model.use_remove_padding and switched:
        reason = "counts tokens without padding, and model.use_remove_padding is false"
        remedy = "set that to true, or this to false"
        return [Problem(f"{role}.{SWITCHES[role]}", "true", reason, remedy) for role in switched]
    return [*_excluding(config), *_limits(config), *_idle(config)]


def _excluding(config: ExperimentConfig) -> Iterator[Problem]:
    """Sizes in sequences of a role whose micro-batches are cut by tokens."""
    for role in _dynamic_roles(config):
        for name in SEQUENCE_SIZES[role]:
            value = getattr(getattr(config, role), name)
            if value is not None:
                reason = f"counts sequences, and {_switch(config, role)} cuts micro-batches by tokens"
                yield Problem(f"{role}.{name}", str(value), reason, "null, or set that to false")


def _limits(config: ExperimentConfig) -> Iterator[Problem]:
    """Token limits that the longest sequence, aligned as the layout needs it, does not fit into."""
    alignment, longest, cp = config.layout.sequence_alignment, config.max_length, config.layout.cp
    told = set()
    for size in _passes(config):
        if size.tokens is None or size.tokens * cp // alignment * alignment >= longest or size.path in told:
            continue
        told.add(size.path)
        reason = (
            f"a sequence can have {longest} tokens (data.max_prompt_length {config.data.max_prompt_length} + "
            f"data.max_response_length {config.data.max_response_length}), and none is cut"
        )
        yield Problem(size.path, str(size.tokens), reason, f"at least {-(-longest // alignment) * alignment // cp}")


def _idle(config: ExperimentConfig) -> Iterator[Problem]:
    """Token limits of roles whose micro-batches are cut by sequences, or that the run has not."""
    dynamic = _dynamic_roles(config) if config.trainer.kind == "ppo" else []
    inherits = {"actor"} if dynamic else set()  # the actor's limits are those of the others where they have none
    for role, names in TOKEN_LIMITS.items():
        for name in names if role not in {*dynamic, *inherits} else ():
            section = getattr(config, role)
            value = getattr(section, name)
            if value != type(section).model_fields[name].default:
                reason, remedy = _why_idle(config, role)
                yield Problem(f"{role}.{name}", typed(value), f"does nothing, for {reason}", remedy, Severity.WARNING)


def _why_idle(config: ExperimentConfig, role: str) -> tuple[str, str]:
    """Why a role's micro-batches are not cut by tokens, and what to do about it."""
    if role == "critic" and (missing := missing_role(config, "critic")) is not None:
        return missing, "leave it out"
    if role == "ref" and not config.has_reference:
        return "this run has no reference", "leave it out"
    if config.trainer.kind != "ppo":
        return f"trainer.kind {config.trainer.kind} cuts micro-batches by sequences", "leave it out"
    return f"{_switch(config, role)} is false", "set that to true, or leave it out"


def _dynamic_roles(config: ExperimentConfig) -> list[str]:
    """The roles of the run whose micro-batches are cut by tokens."""
    roles = ["actor"] if config.actor.use_dynamic_bsz else []
    roles += ["critic"] if config.needs_critic and config.critic_is_dynamic else []
    return roles + (["ref"] if config.needs_reference and config.reference_is_dynamic else [])


def _switch(config: ExperimentConfig, role: str) -> str:
    """The setting that says how the role's micro-batches are cut: its own, or the actor's."""
    own = getattr(getattr(config, role), SWITCHES[role])
    return f"{role}.{SWITCHES[role]}" if own is not None else "actor.use_dynamic_bsz"


def _passes(config: ExperimentConfig) -> Iterator[PassSize]:
    yield actor_update(config)
    yield actor_forward(config)
    if config.needs_critic:
        yield critic_update(config)
        yield critic_forward(config)
    if config.needs_reference:
        yield reference_forward(config)
