"""Settings of parts that a run does not have, or has turned off: nothing reads them, and a warning says so.

Those that another rule tells of more closely are left to it (`checks.py` drops what is told twice); settings that do
nothing beside others of the same part are in `checks_idle.py`.
"""

from collections.abc import Iterator
from typing import Any

from megappo.config.base import Section
from megappo.config.checks_memory import missing_role
from megappo.config.experiment import ExperimentConfig
from megappo.config.problem import Problem, Severity, typed

OF_PPO = (
    "ppo_epochs", "target_kl_per_step", "policy_loss", "clip_ratio", "clip_ratio_low", "clip_ratio_high",
    "clip_ratio_c", "loss_agg_mode", "loss_scale_length", "entropy_coeff", "entropy_coeff_final",
    "entropy_decay_steps", "use_kl_loss", "kl_loss_coef", "kl_loss_type",
)  # fmt: skip
"""Settings of the actor that other kinds of training do not read."""
OF_BUFFER = ("filtration", "power", "storage")
LEAVE_OUT = "leave it out"

Unread = tuple[str, str, str]
"""Path of a setting or of a section, why it is not read, and the way out."""


def unread_problems(config: ExperimentConfig, dp: int | None) -> list[Problem]:
    """A warning for each setting that is not at its default and that nothing reads; `dp` is the data-parallel size
    where it is known."""
    problems: dict[str, Problem] = {}
    for where, reason, remedy in (
        *_of_kind(config),
        *_of_switches(config),
        *_of_replay(config),
        *_of_ranks(config, dp),
    ):
        for path, value in changed(config, where):
            text = f"does nothing, for {reason}"
            problems.setdefault(path, Problem(path, typed(value), text, remedy, Severity.WARNING))
    return list(problems.values())


def changed(config: ExperimentConfig, where: str) -> Iterator[tuple[str, Any]]:
    """Path and value of what is not at its default: the setting `where`, or all settings of that section."""
    *sections, name = where.split(".")
    parent: Any = config
    for each in sections:
        parent = getattr(parent, each)
    value = getattr(parent, name)
    if isinstance(value, Section):
        for below in type(value).model_fields:
            yield from changed(config, f"{where}.{below}")
    elif value != type(parent).model_fields[name].default:
        yield where, list(value) if isinstance(value, tuple) else value


def _of_kind(config: ExperimentConfig) -> Iterator[Unread]:
    kind = config.trainer.kind
    if kind != "ppo":
        for name in OF_PPO:
            yield f"actor.{name}", f"trainer.kind is {kind}", LEAVE_OUT
        yield "algorithm", f"trainer.kind is {kind}", LEAVE_OUT
    if kind != "dpo":
        yield "dpo", f"trainer.kind is {kind}", LEAVE_OUT
    if missing_role(config, "critic") is not None:
        estimator = f"algorithm.adv_estimator {config.algorithm.adv_estimator} has no critic"
        yield "critic", estimator if kind == "ppo" else f"trainer.kind {kind} has no critic", LEAVE_OUT
    if not config.has_reference:
        yield "ref", "this run has no reference", LEAVE_OUT


def _of_switches(config: ExperimentConfig) -> Iterator[Unread]:
    """Settings beside a switch that is off; of a section's `enable`, all others there."""
    controller = config.algorithm.kl_ctrl
    if not config.actor.use_kl_loss:
        for name in ("kl_loss_coef", "kl_loss_type"):
            yield f"actor.{name}", "actor.use_kl_loss is false", f"set that to true, or {LEAVE_OUT}"
    if not config.algorithm.use_kl_in_reward:
        reason, remedy = "algorithm.use_kl_in_reward is false", f"set that to true, or {LEAVE_OUT}"
        yield "algorithm.kl_ctrl", reason, remedy
    elif controller.type == "fixed":
        for name in ("target_kl", "horizon"):
            reason, remedy = "algorithm.kl_ctrl.type is fixed", f"set that to adaptive, or {LEAVE_OUT}"
            yield f"algorithm.kl_ctrl.{name}", reason, remedy
    switches: list[tuple[str, bool]] = [
        ("algorithm.filter_groups", config.algorithm.filter_groups.enable),
        ("rollout.multi_turn", config.rollout.multi_turn.enable),
    ]
    if config.reward is not None:
        switches.append(("reward.overlong_buffer", config.reward.overlong_buffer.enable))
    for section, is_on in switches:
        if not is_on:
            yield section, f"{section}.enable is false", f"set that to true, or {LEAVE_OUT}"
    if not config.observe.samples_freq:
        yield "observe.samples_per_step", "observe.samples_freq is 0", f"set that, or {LEAVE_OUT}"


def _of_replay(config: ExperimentConfig) -> Iterator[Unread]:
    replay = config.replay
    if not replay.size and not replay.pairs:
        for name in ("fraction", *OF_BUFFER):
            yield f"replay.{name}", "replay.size is 0 and there are no replay.pairs", f"set the size, or {LEAVE_OUT}"
    elif replay.pairs:
        for name in OF_BUFFER:
            yield f"replay.{name}", "replay.pairs are drawn from evenly, and are no buffer", LEAVE_OUT
    elif replay.filtration != "power":
        remedy = f"set that to power, or {LEAVE_OUT}"
        yield "replay.power", f"replay.filtration is {replay.filtration}", remedy


def _of_ranks(config: ExperimentConfig, dp: int | None) -> Iterator[Unread]:
    """What data-parallel ranks do among themselves, where there is one."""
    if dp != 1:
        return
    yield "trainer.balance_batch", "there is one data-parallel rank", LEAVE_OUT
    # Experts have copies over tensor parallel ranks too, and all weights over the context parallel ones.
    if config.layout.cp == config.layout.tp == 1:
        for role in ("actor", "critic"):
            for name in ("overlap_grad_reduce", "overlap_param_gather"):
                yield f"{role}.optim.{name}", "there is one data-parallel rank, with nothing to send", LEAVE_OUT
