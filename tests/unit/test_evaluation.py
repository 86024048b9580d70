"""pass@k against counting by hand, and which evaluation is the best."""

from itertools import combinations

import pytest

from megappo.errors import ConfigError
from megappo.trainer.best import BestEvaluation
from megappo.trainer.evaluate import pass_at_k


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
    assert not again.improves(6, {"eval/a/reward": 2.0}) and again.improves(7, {"eval/a/reward": 2.5})
    other = BestEvaluation("eval/b/reward")
    other.load_state_dict(best.state_dict())
    assert other.improves(6, {"eval/b/reward": -1.0})
    assert BestEvaluation(None).state_dict() is None and not BestEvaluation(None).improves(1, {"eval/a/reward": 1.0})


def test_a_metric_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'eval/a/acc' is not in the evaluation; there is eval/a/reward"):
        BestEvaluation("eval/a/acc").improves(0, {"eval/a/reward": 1.0})
