"""Settings of the algorithm that do nothing beside others: a warning each, for they were surely meant to."""

from collections.abc import Iterator
from typing import Any

from megappo.config.algorithm import WITH_CRITIC
from megappo.config.experiment import ExperimentConfig
from megappo.config.optim import OptimConfig
from megappo.config.problem import Problem, Severity, typed

DISCOUNTED = (*WITH_CRITIC, "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Estimators that discount later rewards; the others spread the reward of the sequence over its tokens."""

CORRECTION = "algorithm.rollout_correction"
READERS = {"rollout_is_threshold": ("token", "sequence"), "icepop_low": ("icepop",), "icepop_high": ("icepop",)}
"""Kinds of `rollout_is` that read a setting of the correction."""


def idle_problems(config: ExperimentConfig) -> Iterator[Problem]:
    """Of a PPO run: settings that are not at their default, and that nothing of this run reads."""
    for path, reason, remedy in (*_of_algorithm(config), *_of_losses(config), *_of_critic(config)):
        value, default = _value_and_default(config, path)
        if value != default:
            yield Problem(path, typed(value), f"does nothing, for {reason}", remedy, Severity.WARNING)


def idle_schedule_problems(optim: OptimConfig, name: str) -> Iterator[Problem]:
    """Settings of a decay that the schedule does not have."""
    if optim.lr_scheduler_type != "constant":
        return
    for setting in ("lr_decay_steps", "min_lr_ratio"):
        value = getattr(optim, setting)
        if value != OptimConfig.model_fields[setting].default:
            reason = f"does nothing, for {name}.lr_scheduler_type is constant"
            remedy = "set that to cosine or linear, or leave it out"
            yield Problem(f"{name}.{setting}", typed(value), reason, remedy, Severity.WARNING)


Idle = tuple[str, str, str]
"""Path, reason and way out of a setting that is not read."""


def _of_algorithm(config: ExperimentConfig) -> Iterator[Idle]:
    algorithm, kind = config.algorithm, config.algorithm.adv_estimator
    estimator = f"algorithm.adv_estimator is {kind}"
    if kind not in DISCOUNTED:
        yield "algorithm.gamma", estimator, f"set that to one of {', '.join(DISCOUNTED)}, or leave it out"
    if kind not in WITH_CRITIC:
        yield "algorithm.lam", estimator, "set that to gae, or leave it out"
    if kind == "vapo" and algorithm.lam_critic is None:
        yield "algorithm.lam", "vapo has it depend on the length, and 1 for the returns", "leave it out"
    if not algorithm.use_kl_in_reward:
        yield "algorithm.kl_penalty", "algorithm.use_kl_in_reward is false", "set that to true, or leave it out"
    chosen = algorithm.rollout_correction.rollout_is or "null"
    for name, readers in READERS.items():
        if chosen not in readers:
            remedy = f"set that to {' or '.join(readers)}, or leave it out"
            yield f"{CORRECTION}.{name}", f"{CORRECTION}.rollout_is is {chosen}", remedy


def _of_losses(config: ExperimentConfig) -> Iterator[Idle]:
    actor, mode = config.actor, config.actor.policy_loss.loss_mode
    if mode == "gspo" or None not in (actor.clip_ratio_low, actor.clip_ratio_high):
        reason = (
            "actor.policy_loss.loss_mode gspo has a clip of its own"
            if mode == "gspo"
            else "clip_ratio_low and clip_ratio_high are set"
        )
        yield "actor.clip_ratio", reason, "set clip_ratio_low and clip_ratio_high alone"
    if mode != "vanilla":
        yield "actor.clip_ratio_c", f"actor.policy_loss.loss_mode {mode} has no dual clip", "leave it out"
    modes = [actor.aggregation] + ([config.critic.loss_agg_mode] if config.needs_critic else [])
    if "seq-mean-token-sum-norm" not in modes:
        of_critic = " and critic.loss_agg_mode" if config.needs_critic else ""
        reason = f"actor.loss_agg_mode{of_critic} {'are' if of_critic else 'is'} {' and '.join(dict.fromkeys(modes))}"
        yield "actor.loss_scale_length", reason, "set a mode to seq-mean-token-sum-norm, or leave the length out"


def _of_critic(config: ExperimentConfig) -> Iterator[Idle]:
    if config.needs_critic:
        return
    reason = f"algorithm.adv_estimator {config.algorithm.adv_estimator} has no critic"
    for name in ("ppo_epochs", "cliprange_value", "loss_agg_mode"):
        yield f"critic.{name}", reason, "leave it out"


def _value_and_default(config: ExperimentConfig, path: str) -> tuple[Any, Any]:
    *sections, name = path.split(".")
    section: Any = config
    for each in sections:
        section = getattr(section, each)
    return getattr(section, name), type(section).model_fields[name].default
