"""Rules about the advantage estimator, the losses, and which log-probs may meet in a ratio."""

from collections.abc import Iterator

from megappo.config.algorithm import WITH_GROUPS
from megappo.config.experiment import ExperimentConfig
from megappo.config.problem import Problem, Severity, typed


def algorithm_problems(config: ExperimentConfig) -> list[Problem]:
    """Of sections `algorithm`, `actor`, `critic` and `rollout`, where they contradict each other."""
    return [
        *_estimator_problems(config),
        *_critic_problems(config),
        *_loss_problems(config),
        *_ratio_problems(config),
    ]


def _warning(path: str, value: object, reason: str, remedy: str) -> Problem:
    return Problem(path, typed(value), reason, remedy, Severity.WARNING)


def _estimator_problems(config: ExperimentConfig) -> Iterator[Problem]:
    algorithm, kind = config.algorithm, config.algorithm.adv_estimator
    if kind in WITH_GROUPS and config.rollout.n == 1:
        reason = f"algorithm.adv_estimator {kind} compares the responses to one prompt, and there is one"
        yield Problem("rollout.n", "1", reason, "at least 2, for example 4; or remax, which compares with a greedy one")
    if kind == "remax" and algorithm.normalize_scores:
        reason = "the scores of greedy responses, which algorithm.adv_estimator remax takes off, would stay as they are"
        yield Problem("algorithm.normalize_scores", "true", reason, "false, or reward.normalize")
    if not algorithm.norm_adv_by_std_in_grpo and kind != "grpo":
        reason, remedy = f"does nothing, for algorithm.adv_estimator is {kind}", "leave it out"
        yield _warning("algorithm.norm_adv_by_std_in_grpo", False, reason, remedy)
    for name in ("lam_actor", "lam_critic", "lam_length_alpha"):
        value = getattr(algorithm, name)
        if value is not None and not config.needs_critic:
            reason = f"does nothing, for algorithm.adv_estimator is {kind}"
            yield _warning(f"algorithm.{name}", value, reason, "set that to gae, or leave it out")
    takes_length = algorithm.lam_length_alpha is not None or kind == "vapo"
    if algorithm.lam_actor is not None and takes_length and config.needs_critic:
        because = (
            "algorithm.lam_length_alpha is set" if algorithm.lam_length_alpha else "vapo has it depend on the length"
        )
        yield _warning(
            "algorithm.lam_actor", algorithm.lam_actor, f"does nothing, for {because}", "leave one of them out"
        )


def _critic_problems(config: ExperimentConfig) -> Iterator[Problem]:
    trainer = config.trainer
    if not config.needs_critic:
        without = f"algorithm.adv_estimator {config.algorithm.adv_estimator} has no critic"
        if trainer.critic_warmup:
            remedy = "0, or an estimator with a critic: gae, vapo"
            yield Problem("trainer.critic_warmup", str(trainer.critic_warmup), without, remedy)
        if config.critic.path is not None:
            yield _warning("critic.path", config.critic.path, f"is never read: {without}", "leave it out")
    elif trainer.total_steps is not None and trainer.critic_warmup >= trainer.total_steps:
        reason = f"the actor would never be updated in {trainer.total_steps} steps (trainer.total_steps)"
        yield Problem("trainer.critic_warmup", str(trainer.critic_warmup), reason, f"at most {trainer.total_steps - 1}")


def _loss_problems(config: ExperimentConfig) -> Iterator[Problem]:
    actor = config.actor
    if actor.loss_agg_mode not in ("token-mean", actor.aggregation):
        reason = (
            f"does nothing, for actor.policy_loss.loss_mode {actor.policy_loss.loss_mode} takes {actor.aggregation}"
        )
        yield _warning("actor.loss_agg_mode", actor.loss_agg_mode, reason, "leave it out")
    if actor.entropy_coeff_final and actor.entropy_decay_steps is None:
        reason = "does nothing, for actor.entropy_decay_steps is null"
        yield _warning("actor.entropy_coeff_final", actor.entropy_coeff_final, reason, "set the steps, or leave it out")


def _ratio_problems(config: ExperimentConfig) -> Iterator[Problem]:
    rollout, correction = config.rollout, config.algorithm.rollout_correction
    for name, is_on in (("top_k", rollout.top_k > 0), ("top_p", rollout.top_p < 1)):
        if is_on and not correction.bypass_mode:
            reason = (
                "responses would come from a truncated distribution, whose probabilities the trainer does not compute: "
                "the ratio would be wrong"
            )
            remedy = f"{'0' if name == 'top_k' else '1.0'}, or algorithm.rollout_correction.bypass_mode true"
            yield Problem(f"rollout.{name}", typed(getattr(rollout, name)), reason, remedy)
    if config.algorithm.use_kl_in_reward and (rollout.top_k > 0 or rollout.top_p < 1):
        reason = (
            "the old log-probs are those of the truncated distribution (rollout.top_k, rollout.top_p), whose KL to the "
            "reference is not 0 even where the policies are the same"
        )
        yield _warning("algorithm.use_kl_in_reward", True, reason, "put the KL in the loss: actor.use_kl_loss")
    path = "algorithm.rollout_correction"
    if correction.bypass_mode and correction.rollout_is is not None:
        reason = f"with {path}.bypass_mode the old log-probs are the engine's own, and every weight would be 1"
        yield Problem(f"{path}.rollout_is", typed(correction.rollout_is), reason, "null, or set bypass_mode to false")
    if correction.icepop_low > correction.icepop_high:
        reason = f"is above icepop_high {correction.icepop_high:g}"
        yield Problem(f"{path}.icepop_low", typed(correction.icepop_low), reason, "for example 0.5 and 5.0")
