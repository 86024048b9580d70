"""Rules about routers and experts: what may be asked of them where."""

from collections.abc import Iterator

from megappo.config.experiment import ExperimentConfig
from megappo.config.model_folder import ROUTER_BIAS, ModelFolderError, read_model_facts
from megappo.config.problem import Problem, Severity, typed


def expert_problems(config: ExperimentConfig) -> list[Problem]:
    """Of `model.moe`, which is the critic's too, and `actor.router_replay`. A folder that can't be read is told
    elsewhere."""
    critic = config.critic.path if config.trainer.kind == "ppo" and config.needs_critic else None
    try:
        facts = [read_model_facts(path) for path in (config.model.path, critic) if path is not None]
    except ModelFolderError:
        return []
    actor_has = facts[0].num_experts is not None
    any_has = any(each.num_experts is not None for each in facts)
    problems = [*(_dispatcher_problems(config) if any_has else _dense_problems(config))]
    if any_has:
        problems += _bias_problems(config, any(each.has_router_bias for each in facts))
    replay = config.actor.router_replay
    if actor_has:
        problems += _replay_problems(config)
    elif replay != "off":
        problems.append(_is_dense(config, "actor.router_replay", replay, "off"))
    return problems + list(_idle_problems(config))


def _dense_problems(config: ExperimentConfig) -> Iterator[Problem]:
    moe = config.model.moe
    settings = [
        ("model.experts", config.model.experts, "grouped"),
        ("model.moe.aux_loss_coeff", moe.aux_loss_coeff, 0.0),
        ("model.moe.z_loss_coeff", moe.z_loss_coeff, 0.0),
        ("model.moe.bias_update_rate", moe.bias_update_rate, 0.0),
        ("model.moe.dispatcher", moe.dispatcher, "alltoall"),
        ("model.moe.capacity_factor", moe.capacity_factor, None),
    ]
    for path, value, default in settings:
        if value != default:
            yield _is_dense(config, path, value, default)


def _is_dense(config: ExperimentConfig, path: str, value: object, default: object) -> Problem:
    reason = f"is for models with experts, and {config.model.path} is dense"
    usual = default if isinstance(default, str) else typed(default)
    return Problem(path, typed(value), reason, f"leave it out, or set it to {usual}")


def _idle_problems(config: ExperimentConfig) -> Iterator[Problem]:
    """A rule of dropping where nothing is dropped."""
    moe = config.model.moe
    if moe.token_drop_policy != "probs" and moe.capacity_factor is None:
        reason = "does nothing, for model.moe.capacity_factor is null, which drops no token"
        remedy = "set that, for example to 1.25, or leave this out"
        yield Problem("model.moe.token_drop_policy", moe.token_drop_policy, reason, remedy, Severity.WARNING)


def _bias_problems(config: ExperimentConfig, has_bias: bool) -> Iterator[Problem]:
    path, rate = "model.moe.bias_update_rate", config.model.moe.bias_update_rate
    if not rate:
        return
    if not has_bias:
        reason = (
            f"moves biases of routers, which models of {', '.join(ROUTER_BIAS)} have, and {config.model.path} has none"
        )
        yield Problem(path, typed(rate), reason, "set it to 0, and model.moe.aux_loss_coeff to balance its experts")
        return
    for setting, lora in (("model.lora.rank", config.model.lora), ("critic.lora.rank", config.critic.lora)):
        if lora.is_used:
            reason = f"the biases belong to the frozen weights, which {setting} {lora.rank} leaves as they are"
            yield Problem(path, typed(rate), reason, f"set it to 0, or {setting} to 0")


def _dispatcher_problems(config: ExperimentConfig) -> Iterator[Problem]:
    layout = config.layout
    if config.model.moe.dispatcher != "allgather":
        return
    experts = layout.ep * layout.expert_tp
    remedy = "alltoall"
    if layout.tp % experts:
        reason = (
            f"the ep {layout.ep} · etp {layout.expert_tp} = {experts} ranks that share experts would have to hold the "
            f"same number of tokens, which only ranks of one TP group do, and layout.tp is {layout.tp}"
        )
        yield Problem("model.moe.dispatcher", "allgather", reason, remedy)
    elif layout.pp > 1:
        reason = (
            f"Megatron does not gather tokens where micro-batches differ in length over layout.pp {layout.pp} stages"
        )
        yield Problem("model.moe.dispatcher", "allgather", reason, remedy)


def _replay_problems(config: ExperimentConfig) -> Iterator[Problem]:
    mode, path = config.actor.router_replay, "actor.router_replay"
    if mode == "off":
        return
    if config.trainer.kind != "ppo":
        reason = f"replays what a step's own experience recorded, and trainer.kind {config.trainer.kind} has none"
        yield Problem(path, mode, reason, "off")
        return
    if config.replay.size or config.replay.pairs:
        yield Problem(path, mode, "sequences of section replay come without recorded experts", "off, or no replay")
    if mode == "old_log_probs" and config.algorithm.rollout_correction.bypass_mode:
        reason = "algorithm.rollout_correction.bypass_mode leaves out the old log-prob pass, which records"
        yield Problem(path, mode, reason, "rollout, or off")
