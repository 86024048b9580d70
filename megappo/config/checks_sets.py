"""Rules about prompt sets, replay, dynamic sampling, turns, and what the best checkpoint is."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from megappo.config.base import Section
from megappo.config.data_names import HUB_PREFIX
from megappo.config.evaluation_metrics import evaluation_metrics
from megappo.config.experiment import ExperimentConfig
from megappo.config.problem import Problem, Severity, typed
from megappo.config.reward import RewardPartConfig

GROUP_FREE = ("gae", "vapo", "reinforce_plus_plus")
"""Estimators that see each sequence by itself."""
RULES = ("exact_match", "gsm8k", "math_verify")
"""Reward parts that say right or wrong."""


def set_problems(config: ExperimentConfig) -> list[Problem]:
    """Prompt sets that can't be mixed or scored."""
    data, problems = config.data, []
    if not data.train_files and not data.sets:
        problems.append(Problem("data.train_files", None, "is missing, and there are no data.sets", "name a file"))
    if data.train_files and data.sets:
        reason = "both it and data.sets have prompts"
        remedy = "make it an entry of data.sets, or drop one of the two"
        problems.append(Problem("data.train_files", typed(list(data.train_files)), reason, remedy))
    if data.sets and config.trainer.kind != "ppo":
        problems.append(
            Problem("data.sets", None, f"trainer.kind {config.trainer.kind} learns from data.train_files", "use that")
        )
    parts = [part.name for part in config.reward.parts] if config.reward else []
    names: set[str] = set()
    for index, one in enumerate(data.sets):
        if one.name in names:
            path, remedy = f"data.sets.{index}.name", f"for example {one.name}_{index}"
            problems.append(Problem(path, typed(one.name), "another set has this name", remedy))
        names.add(one.name)
        for place, part in enumerate(one.reward):
            if part not in parts:
                path, remedy = f"data.sets.{index}.reward.{place}", f"one of {', '.join(parts) or 'reward.parts'}"
                problems.append(Problem(path, typed(part), "no reward part has this name", remedy))
    return problems


def experience_problems(config: ExperimentConfig) -> list[Problem]:
    """Replay, dynamic sampling, turns and the best checkpoint."""
    ppo_alone = [*_replay_problems(config), *_filter_problems(config)]
    of_kind = ppo_alone if config.trainer.kind == "ppo" else _unused(config)
    return [*of_kind, *_turn_problems(config), *_best_problems(config)]


def _unused(config: ExperimentConfig) -> list[Problem]:
    """Settings of PPO's experience in an experiment that learns from a fixed data set."""
    sections: list[tuple[str, Section, Iterable[str]]] = [
        ("data", config.data, ["prefetch"]),
        ("replay", config.replay, type(config.replay).model_fields),
        ("algorithm.filter_groups", config.algorithm.filter_groups, ["enable"]),
        ("trainer", config.trainer, ["critic_warmup"]),
    ]
    reason = f"does nothing, for trainer.kind is {config.trainer.kind}"
    return [
        Problem(f"{path}.{name}", typed(value), reason, "leave it out", Severity.WARNING)
        for path, section, names in sections
        for name in names
        if (value := getattr(section, name)) != type(section).model_fields[name].default
    ]


def _replay_problems(config: ExperimentConfig) -> list[Problem]:
    settings, estimator = config.replay, config.algorithm.adv_estimator
    if not settings.size and not settings.pairs:
        return []
    problems = []
    path, value, off = (
        ("replay.size", typed(settings.size), "set it to 0")
        if settings.size
        else ("replay.pairs", typed(list(settings.pairs)), "leave it out")
    )
    if estimator not in GROUP_FREE:
        reason = (
            f"draws are single sequences, and algorithm.adv_estimator {estimator} compares the responses to a prompt"
        )
        problems.append(Problem(path, value, reason, f"{off}, or the estimator to {' or '.join(GROUP_FREE)}"))
    if settings.pairs and settings.size:
        reason = "draws come from replay.pairs, and with replay.size from a buffer"
        problems.append(Problem("replay.size", typed(settings.size), reason, "set it to 0, or leave the pairs out"))
    if settings.pairs and config.data.sets:
        reason = "has pairs of no prompt set, and data.sets have rewards of their own"
        problems.append(Problem("replay.pairs", typed(list(settings.pairs)), reason, "use data.train_files"))
    for index, file in enumerate(settings.pairs):
        if not file.startswith(HUB_PREFIX) and not Path(file.rpartition("@")[0] or file).exists():
            remedy = "give a JSONL or Parquet file, a saved data set's folder, or hub:NAME"
            problems.append(Problem(f"replay.pairs.{index}", typed(file), "there is no such file", remedy))
    return problems


def _filter_problems(config: ExperimentConfig) -> list[Problem]:
    groups, path = config.algorithm.filter_groups, "algorithm.filter_groups"
    if not groups.enable or config.reward is None:
        return []
    problems = []
    if config.rollout.n == 1:
        problems.append(
            Problem(f"{path}.enable", "true", "a group of rollout.n 1 response never differs", "set rollout.n to 2")
        )
    if config.algorithm.adv_estimator == "remax":
        reason = "remax compares with a greedy response, and learns from groups that don't differ too"
        problems.append(Problem(f"{path}.enable", "true", reason, "set it to false"))
    names = _scores(config.reward.training_parts)
    of_sets = {
        one.name: _scores([part for part in config.reward.training_parts if not one.reward or part.name in one.reward])
        for one in config.data.sets
    }
    common = [name for name in names if all(name in scores for scores in of_sets.values())]
    without = [name for name, scores in of_sets.items() if groups.metric not in scores]
    if groups.metric not in names:
        reason = "is no score of this experiment" if groups.metric != "acc" else "no reward part is a rule"
        problems.append(Problem(f"{path}.metric", typed(groups.metric), reason, f"one of {', '.join(common)}"))
    elif without:
        what = "no rule part scores" if groups.metric == "acc" else "it does not score"
        reason = f"{what} prompts of data.sets {', '.join(without)}, whose groups would never differ, nor be trained on"
        added = "such a part" if groups.metric == "acc" else "the part"
        remedy = f"one that all sets have ({', '.join(common)}), or {added} in their reward"
        problems.append(Problem(f"{path}.metric", typed(groups.metric), reason, remedy))
    return problems


def _scores(parts: Sequence[RewardPartConfig]) -> list[str]:
    """What responses that these parts score can be told apart by."""
    has_rule = any(part.kind in RULES for part in parts)
    return ["score", *(part.name for part in parts), *(["acc"] if has_rule else [])]


def _turn_problems(config: ExperimentConfig) -> list[Problem]:
    turns, path = config.rollout.multi_turn, "rollout.multi_turn.environment"
    example = "for example megappo.environments.calculator:Calculator"
    if not turns.enable:
        return []
    if turns.environment is None:
        return [Problem(path, None, "is missing, and rollout.multi_turn.enable needs it", example)]
    module, colon, name = turns.environment.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        return [Problem(path, typed(turns.environment), "has to be of the form module:class", example)]
    return []


def _best_problems(config: ExperimentConfig) -> list[Problem]:
    metric, evaluation = config.trainer.best_metric, config.trainer.evaluation
    for index, k in enumerate(evaluation.pass_at):
        if not 1 <= k <= evaluation.n:
            reason = f"has to be between 1 and trainer.evaluation.n {evaluation.n}"
            remedy = f"for example {evaluation.n}, or set n to {k}" if k > 0 else "for example 1"
            return [Problem(f"trainer.evaluation.pass_at.{index}", typed(k), reason, remedy)]
    if metric is None and config.trainer.best_mode is not None:
        reason, mode = "does nothing, for trainer.best_metric is null", typed(config.trainer.best_mode)
        return [Problem("trainer.best_mode", mode, reason, "name one there, or leave it out", Severity.WARNING)]
    if metric is None or (config.reward is None and config.trainer.kind == "ppo"):  # which is refused elsewhere
        return []
    known = evaluation_metrics(config)
    if metric in known:
        return []
    if not config.data.has_val_files:
        reason, remedy = "there is nothing to evaluate: data.val_files is empty", "name files there, or leave it out"
    elif not known:
        reason = "there is nothing to evaluate: held-out prompts have no reward to score their answers with"
        remedy = "add reward.parts, or leave it out"
    else:
        reason, remedy = "is no metric of this run's evaluation", f"one of {', '.join(known)}"
    return [Problem("trainer.best_metric", typed(metric), reason, remedy)]
