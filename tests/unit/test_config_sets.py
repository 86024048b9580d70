"""Rules about prompt sets, replay, dynamic sampling, turns and the best checkpoint: each message."""
# ruff: noqa: E501  a line of a table is one case, with the whole message

from pathlib import Path

import pytest

from tests.unit.test_config_checks import found

ONE = "data.sets=[{name: a, files: [F/train.jsonl]}]"
GRPO = ["algorithm.adv_estimator=grpo", "rollout.n=2"]
FILTER = ["algorithm.filter_groups.enable=true", "rollout.n=2"]
PARTS = "reward.parts=[{name: rule, kind: exact_match}, {name: other, kind: gsm8k}, {name: style, kind: function, function: 'm:f'}]"
VAL = "data.val_files=[F/train.jsonl]"
HELD_OUT_SETS = "data.sets=[{name: a, files: [F/train.jsonl], val_files: [F/train.jsonl], reward: [rule, style]}, {name: b, files: [F/train.jsonl], val_files: [F/train.jsonl], reward: [style]}, {name: c, files: [F/train.jsonl]}]"
TURNS = "rollout.multi_turn.enable=true"


def sets(one: str, other: str) -> list[str]:
    """Two sets, a and b, scored by these of three parts."""
    files = "files: [F/train.jsonl]"
    mixed = f"data.sets=[{{name: a, {files}, reward: [{one}]}}, {{name: b, {files}, reward: [{other}]}}]"
    return ["data.train_files=[]", PARTS, mixed]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.train_files=[]"], "error data.train_files: is missing, and there are no data.sets"),
        ([ONE], "both it and data.sets have prompts"),
        (["data.train_files=[]", ONE, "trainer.kind=sft"], "error data.sets: trainer.kind sft learns from data.train_files"),
        (["data.train_files=[]", "data.sets=[{name: a, files: [F/train.jsonl]}, {name: a, files: [F/train.jsonl]}]"], 'error data.sets.1.name: "a": another set has this name; for example a_1'),
        (["data.train_files=[]", "data.sets=[{name: a, files: [F/train.jsonl], reward: [style]}]"], 'error data.sets.0.reward.0: "style": no reward part has this name; one of correct'),
        (["data.train_files=[]", "data.sets=[{name: a, files: [F/nowhere.jsonl]}]"], "error data.sets.0.files.0: "),
        ([*GRPO, "replay.size=8"], "error replay.size: 8: draws are single sequences, and algorithm.adv_estimator grpo compares the responses to a prompt"),
        (["algorithm.filter_groups.enable=true"], "error algorithm.filter_groups.enable: true: a group of rollout.n 1 response never differs; set rollout.n to 2"),
        ([*FILTER, "algorithm.filter_groups.metric=speed"], 'error algorithm.filter_groups.metric: "speed": is no score of this experiment; one of score, correct, acc'),
        ([*FILTER, *sets("rule", "style"), "algorithm.filter_groups.metric=rule"], 'error algorithm.filter_groups.metric: "rule": it does not score prompts of data.sets b, whose groups would never differ, nor be trained on; one that all sets have (score), or the part in their reward'),
        ([*FILTER, *sets("rule", "style"), "algorithm.filter_groups.metric=acc"], 'error algorithm.filter_groups.metric: "acc": no rule part scores prompts of data.sets b, whose groups would never differ, nor be trained on; one that all sets have (score), or such a part in their reward'),
        ([*FILTER, *sets("style, rule", "style"), "algorithm.filter_groups.metric=other"], 'error algorithm.filter_groups.metric: "other": it does not score prompts of data.sets a, b, whose groups would never differ, nor be trained on; one that all sets have (score, style), or the part in their reward'),
        ([*FILTER, *sets("rule", "style"), "algorithm.filter_groups.metric=speed"], 'error algorithm.filter_groups.metric: "speed": is no score of this experiment; one of score'),
        ([*FILTER, "algorithm.adv_estimator=remax"], "error algorithm.filter_groups.enable: true: remax compares with a greedy response"),
        (["trainer.kind=sft", "data.prefetch=true"], "warning data.prefetch: true: does nothing, for trainer.kind is sft; leave it out"),
        (["trainer.kind=dpo", "replay.size=8"], "warning replay.size: 8: does nothing, for trainer.kind is dpo; leave it out"),
        (["trainer.kind=dpo", "replay.fraction=0.25"], "warning replay.fraction: 0.25: does nothing, for trainer.kind is dpo; leave it out"),
        (["trainer.kind=reward_model", "replay.pairs=[F/train.jsonl]"], "does nothing, for trainer.kind is reward_model; leave it out"),
        (["trainer.kind=sft", *FILTER], "warning algorithm.filter_groups.enable: true: does nothing, for trainer.kind is sft; leave it out"),
        (["trainer.kind=sft", "trainer.critic_warmup=2"], "warning trainer.critic_warmup: 2: does nothing, for trainer.kind is sft; leave it out"),
        ([TURNS], "error rollout.multi_turn.environment: is missing, and rollout.multi_turn.enable needs it; for example megappo.environments.calculator:Calculator"),
        ([TURNS, "rollout.multi_turn.environment=calculator"], 'error rollout.multi_turn.environment: "calculator": has to be of the form module:class'),
        ([VAL, "trainer.best_metric=reward/score"], 'error trainer.best_metric: "reward/score": is no metric of this run\'s evaluation; one of eval/train/reward, eval/train/response_length, eval/train/exact_match, eval/train/pass_at_k'),
        ([VAL, "trainer.best_metric=eval/val/exact_match"], "is no metric of this run's evaluation; one of eval/train/reward"),
        ([VAL, "trainer.best_metric=eval/train/accuracy"], "is no metric of this run's evaluation; one of eval/train/reward"),
        ([VAL, "trainer.best_metric=eval/train/pass_at_2"], "is no metric of this run's evaluation; one of eval/train/reward"),
        ([VAL, "trainer.best_metric=eval/train/reward", "trainer.kind=reward_model"], "is no metric of this run's evaluation; one of eval/train/accuracy, eval/train/margin, eval/train/loss"),
        ([VAL, "trainer.best_metric=eval/train/reward", "trainer.kind=dpo", "reward=null"], "is no metric of this run's evaluation; one of eval/train/accuracy"),
        ([VAL, "trainer.best_metric=eval/train/reward", "trainer.kind=sft", "reward=null"], 'error trainer.best_metric: "eval/train/reward": there is nothing to evaluate: held-out prompts have no reward to score their answers with; add reward.parts, or leave it out'),
        (["data.train_files=[]", PARTS, HELD_OUT_SETS, "trainer.best_metric=eval/b/exact_match"], "is no metric of this run's evaluation; one of eval/a/reward, eval/a/response_length, eval/a/exact_match, eval/a/pass_at_k, eval/b/reward, eval/b/response_length"),
        (["data.train_files=[]", PARTS, HELD_OUT_SETS, "trainer.best_metric=eval/c/reward"], "is no metric of this run's evaluation; one of eval/a/reward"),
        (["trainer.best_metric=eval/val/reward"], "error trainer.best_metric: \"eval/val/reward\": there is nothing to evaluate"),
        ([VAL, "trainer.best_mode=min"], 'warning trainer.best_mode: "min": does nothing, for trainer.best_metric is null; name one there, or leave it out'),
        (["trainer.evaluation.n=2", "trainer.evaluation.temperature=1", "trainer.evaluation.pass_at=[1,4]"], "error trainer.evaluation.pass_at.1: 4: has to be between 1 and trainer.evaluation.n 2; for example 2, or set n to 4"),
    ],
)  # fmt: skip
def test_messages(tmp_path: Path, overrides: list[str], expected: str) -> None:
    problems = found(tmp_path, *(word.replace("F/", f"{tmp_path}/") for word in overrides))
    assert any(expected in problem for problem in problems), problems


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.train_files=[]", "data.sets=[{name: a, files: [F/train.jsonl], reward: [correct]}]"],
        ["replay.size=8"],
        [*FILTER, "algorithm.filter_groups.metric=acc"],
        [*FILTER, "algorithm.filter_groups.metric=correct", *GRPO],
        [*FILTER, *sets("rule", "other"), "algorithm.filter_groups.metric=acc"],
        [*FILTER, *sets("rule, style", ""), "algorithm.filter_groups.metric=style"],
        [*FILTER, *sets("rule", "style"), "algorithm.filter_groups.metric=score"],
        [TURNS, "rollout.multi_turn.environment=my_project.envs:Game"],
        [VAL, "trainer.best_metric=eval/train/margin", "trainer.kind=dpo", "reward=null"],
        [VAL, "trainer.best_metric=eval/train/exact_match", "trainer.kind=dpo"],
        [VAL, "trainer.best_metric=eval/train/response_length", "trainer.best_mode=min"],
        [VAL, "trainer.best_metric=eval/train/accuracy", "trainer.kind=reward_model"],
        [VAL, "trainer.best_metric=eval/train/pass_at_2", "trainer.evaluation.n=4", "trainer.evaluation.temperature=1", "trainer.evaluation.pass_at=[2]"],
        ["data.train_files=[]", PARTS, HELD_OUT_SETS, "trainer.best_metric=eval/a/exact_match"],
        ["trainer.best_metric=eval/train/reward", "data.val_files=[F/train.jsonl]", "trainer.evaluation.n=4", "trainer.evaluation.temperature=1", "trainer.evaluation.pass_at=[1,2]"],
    ],
)  # fmt: skip
def test_what_is_allowed_passes(tmp_path: Path, overrides: list[str]) -> None:
    problems = found(tmp_path, *(word.replace("F/", f"{tmp_path}/") for word in overrides))
    assert not [problem for problem in problems if problem.startswith("error")]
