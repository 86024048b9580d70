"""PPO from a reward model, with rewards of tokens and shaped scores: the same on another layout, also when resumed."""

from pathlib import Path

import pytest

from tests.support.runs import REWARDS, learning, succeed, write_run_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(three steps on two data-parallel ranks, the third of them again on two tensor-parallel ranks)."""
    folder = tmp_path_factory.mktemp("rewards")
    experiment = write_run_experiment(folder)
    # Another family, tokenizer folder and template than the actor's.
    tiny_tokenizer(tiny_model(folder / "judge", "qwen2", value_head=True, seed=3))
    parts = (
        f"{{name: judge, kind: model, path: {folder}/judge, weight: 2.0}}, "
        f"{{name: tokens, kind: function, function: '{REWARDS}:each_token'}}"
    )
    words = [
        "train", experiment, f"reward.parts=[{parts}]", "reward.normalize=standard", "reward.clip_range=[-1.5,1.5]",
        "reward.overlong_buffer={enable: true, len: 4, penalty_factor: 0.5}", "trainer.total_steps=3",
    ]  # fmt: skip
    whole, resumed = folder / "whole", folder / "resumed"
    succeed(*words, "layout.dp=2", f"trainer.run_dir={whole}", "trainer.save_freq=2")
    checkpoint = whole / "checkpoints" / "step-000002"
    succeed(*words, "layout.tp=2", f"trainer.run_dir={resumed}", f"trainer.resume={checkpoint}")
    return whole, resumed


def test_a_resumed_run_on_another_layout_goes_on_with_scores_and_moments(runs: tuple[Path, Path]) -> None:
    expected, found = (next(line for line in learning(run) if line["step"] == 3) for run in runs)
    names = [name for name in expected if not name.startswith("hybrid/")]
    assert {name: found[name] for name in names} == pytest.approx({n: expected[n] for n in names}, rel=1e-4, abs=1e-5)


def test_each_part_is_reported_before_its_weight_and_shaping(runs: tuple[Path, Path]) -> None:
    first = next(line for line in learning(runs[0]) if line["step"] == 1)
    # The moments of the first step alone, of 2 · judge: the tokens' rewards are no part of the sequence's score.
    assert first["reward/running_mean"] == pytest.approx(2.0 * first["reward/parts/judge"], rel=1e-6)
    assert 0 < first["reward/overlong_penalty"] <= 0.5
    assert first["reward/parts/tokens"] > 0 and first["reward/failed"] == 0
    assert first["reward/score"] - first["reward/token_reward"] == pytest.approx(first["reward/kl_penalty"], abs=1e-6)
