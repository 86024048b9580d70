"""pass@k against counting by hand, which reward scores which held-out prompts, and which evaluation is the best."""

import json
import math
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megappo.algorithms.preferences import PairLoss
from megappo.config.evaluation_metrics import OF_PAIRS, best_mode, evaluation_metrics
from megappo.config.trainer import BestMode, TrainerConfig
from megappo.data.tokenizer import load_tokenizer
from megappo.experience.sample import RolloutSample
from megappo.trainer.best import BestEvaluation
from megappo.trainer.build import load_evaluation_sets
from megappo.trainer.build_experience import reward_worker
from megappo.trainer.evaluate import Evaluator, pass_at_k
from megappo.trainer.pair_evaluation import PairEvaluator
from tests.support.experiments import small_experiment
from tests.support.tiny_models import tiny_tokenizer


@pytest.mark.parametrize("n", [1, 4, 7])
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(n: int) -> None:
    for num_right in range(n + 1):
        right = [place < num_right for place in range(n)]
        for k in range(1, n + 1):
            choices = list(combinations(right, k))
            assert pass_at_k(n, num_right, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_at_its_ends() -> None:
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert (pass_at_k(10, 0, 10), pass_at_k(10, 1, 10), pass_at_k(4, 3, 2)) == (0.0, 1.0, 1.0)


def test_the_first_of_equal_evaluations_is_the_best_over_resumes() -> None:
    best = BestEvaluation("eval/a/reward")
    found = [best.improves(step, {"eval/a/reward": value}) for step, value in enumerate([9.0, 1.0, 1.0, 0.5, 2.0])]
    assert found == [False, True, False, False, True]  # step 0 has no checkpoint
    assert not best.improves(5, {})  # no evaluation in this step
    again = BestEvaluation("eval/a/reward")
    again.load_state_dict(best.state_dict())
    assert again.step == 4 and BestEvaluation("eval/a/reward").step is None
    assert not again.improves(6, {"eval/a/reward": 2.0}) and again.improves(7, {"eval/a/reward": 2.5})
    other = BestEvaluation("eval/b/reward")
    other.load_state_dict(best.state_dict())
    assert other.improves(6, {"eval/b/reward": -1.0})
    assert BestEvaluation(None).state_dict() is None and not BestEvaluation(None).improves(1, {"eval/a/reward": 1.0})


def test_the_lowest_is_the_best_of_a_loss() -> None:
    best = BestEvaluation("eval/a/loss", "min")
    found = [best.improves(step, {"eval/a/loss": value}) for step, value in enumerate([0.1, 0.7, 0.9, 0.7, 0.5])]
    assert found == [False, True, False, False, True]
    again = BestEvaluation("eval/a/loss", "min")
    again.load_state_dict(best.state_dict())
    assert again.step == 4 and not again.improves(5, {"eval/a/loss": 0.6}) and again.improves(6, {"eval/a/loss": 0.4})


@pytest.mark.parametrize(("mode", "values", "marked"), [("max", (1.0, 2.0), 5), ("min", (2.0, 1.0), 5)])
def test_what_is_not_finite_is_never_the_best(mode: BestMode, values: tuple[float, float], marked: int) -> None:
    nan, (worse, better) = math.nan, values
    best = BestEvaluation("eval/a/reward", mode)
    measured = [nan, nan, math.inf, -math.inf, worse, better, nan]
    found = [step for step, value in enumerate(measured) if best.improves(step, {"eval/a/reward": value})]
    assert found == [4, 5] and best.step == marked
    of_before = BestEvaluation("eval/a/reward", mode)  # a checkpoint of a run whose first evaluation was the best
    of_before.load_state_dict({"metric": "eval/a/reward", "mode": mode, "value": nan, "step": 2})
    assert of_before.step is None and of_before.improves(4, {"eval/a/reward": worse})


def test_a_mark_of_the_other_mode_counts_no_more() -> None:
    mark = {"metric": "eval/a/loss", "value": 0.9, "step": 2}  # the highest: of a run that knew no modes
    lowest, highest = BestEvaluation("eval/a/loss", "min"), BestEvaluation("eval/a/loss", "max")
    for best in (lowest, highest):
        best.load_state_dict(mark)
    assert lowest.step is None and lowest.improves(4, {"eval/a/loss": 1.0})
    assert highest.step == 2 and not highest.improves(4, {"eval/a/loss": 0.5})


@pytest.mark.parametrize(
    ("metric", "mode"),
    [
        ("eval/a/loss", "min"), ("eval/a/kl", "min"), ("eval/a/perplexity", "min"), ("eval/a/turn_errors", "min"),
        ("eval/a/accuracy", "max"), ("eval/a/margin", "max"), ("eval/a/reward", "max"), ("eval/a/exact_match", "max"),
        ("eval/loss/pass_at_k", "max"),  # the name of a data set
    ],
)  # fmt: skip
def test_the_mode_goes_by_the_name_of_what_is_measured(metric: str, mode: BestMode) -> None:
    trainer = TrainerConfig(run_dir="run", best_metric=metric)
    assert best_mode(trainer) == mode
    for told in ("max", "min"):
        assert best_mode(trainer.model_copy(update={"best_mode": told})) == told


class SameAnswer:
    """Stands for the rollout worker: one response to every prompt."""

    def __init__(self, text: str) -> None:
        self._text = text

    def sync_weights(self) -> None: ...

    def release(self) -> None: ...

    def sample(self, prompts: Any, positions: Any, *rest: Any) -> list[RolloutSample]:
        return [RolloutSample(prompts[one], one, 0, (3,), (0.0,), self._text, "stop") for one in positions]


# Both parts find "7" right, only the second one, whose weight is ½, "#### 7".
@pytest.mark.parametrize(
    ("response", "of_first", "of_file"), [("7", 1.0, 1.5), ("#### 7", 0.0, 0.5)], ids=["plain", "marked"]
)
# One of two sets may have all parts, which is then the worker of the file too; the file may have a set's name.
@pytest.mark.parametrize("second", ["[last]", "[]"])
@pytest.mark.parametrize("name", ["held", "second"])
def test_held_out_files_beside_prompt_sets_are_scored_by_all_parts(
    tmp_path: Path, response: str, of_first: float, of_file: float, second: str, name: str
) -> None:
    for file in ("first", name):
        (tmp_path / f"{file}.jsonl").write_text(json.dumps({"prompt": "3+4=", "answer": "7"}) + "\n")
    config = small_experiment(
        tmp_path,
        "data.train_files=[]",
        f"data.val_files=[{tmp_path}/{name}.jsonl]",
        f"data.sets=[{{name: first, files: [{tmp_path}/first.jsonl], val_files: [{tmp_path}/first.jsonl], "
        f"reward: [correct]}}, {{name: second, files: [{tmp_path}/first.jsonl], reward: {second}}}]",
        "data.apply_chat_template=false",
        "reward.parts=[{name: correct, kind: exact_match}, {name: last, kind: gsm8k, weight: 0.5}]",
    )
    group = SimpleNamespace(size=lambda: 1)
    mesh: Any = SimpleNamespace(
        dp_group=group, sequence_group=group, group_leader=0, is_group_leader=True, dp_rank=0, dp=1,
        device=torch.device("cpu"),
    )  # fmt: skip
    sets = load_evaluation_sets(config, load_tokenizer(tiny_tokenizer(tmp_path / "tokenizer")))
    reward, rollout, sampling = reward_worker(config, mesh), SameAnswer(response), SimpleNamespace()
    evaluator = Evaluator(mesh, sets, rollout, reward, config.trainer.evaluation, sampling)  # type: ignore[arg-type]
    found = evaluator.run()
    assert {key: value for key, value in found.items() if key.endswith("/reward")} == {
        f"eval/{name}/reward": of_file,
        "eval/first/reward": of_first,
    }
    assert sorted(found) == sorted(evaluation_metrics(config))
    reward.close()


def test_what_is_measured_of_pairs_is_known_before() -> None:
    measured = PairLoss(*(torch.zeros(1) for _ in fields(PairLoss)))
    mesh: Any = SimpleNamespace(dp_group=SimpleNamespace(size=lambda: 1), dp_rank=0, dp=1, device=torch.device("cpu"))
    evaluation = PairEvaluator(mesh, {"held": [None]}, lambda pairs: measured).run()
    assert sorted(evaluation) == sorted(f"eval/held/{measure}" for measure in OF_PAIRS)
