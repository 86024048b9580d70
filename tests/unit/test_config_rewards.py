"""Rules of the reward section and of preference training: what is refused, in the user's terms."""

from pathlib import Path

import pytest

from megappo.cli import main
from megappo.config.checks import check_experiment
from megappo.errors import ConfigError
from tests.support.experiments import small_experiment, write_experiment


def problems(folder: Path, *overrides: str) -> list[str]:
    config = small_experiment(folder, *overrides)
    return [f"{problem.severity.value} {problem.text()}" for problem in check_experiment(config)]


def part(text: str) -> str:
    return f"reward.parts=[{{name: one, {text}}}]"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (part("kind: http"), "error reward.parts.0.url: is missing, and kind http needs it; for example http://localhost"),
        (part("kind: http, url: localhost/x"), 'url: "localhost/x": has to be an address of http or https'),
        (part("kind: model"), "error reward.parts.0.path: is missing, and kind model needs it"),
        (part("kind: model, path: nowhere"), 'error reward.parts.0.path: "nowhere": there is no such folder'),
        (part("kind: gsm8k, url: http://a/b"), 'url: "http://a/b": kind gsm8k takes no url; set kind to http'),
        (part("kind: gsm8k, path: a"), 'reward.parts.0.path: "a": kind gsm8k takes no path; set kind to model'),
        (part("kind: gsm8k, function: a:b"), "kind gsm8k takes no function; set kind to function, or drop it"),
        (part("kind: function, function: a:b, retries: 3"), "reward.parts.0.retries: 3: is for parts of kind http"),
        (part("kind: gsm8k, micro_batch_size_per_gpu: 3"), "micro_batch_size_per_gpu: 3: is for parts of kind model"),
        ("reward.clip_range=[1,-1]", "error reward.clip_range: [1.0, -1.0]: has to be a lower and a higher score"),
        ("reward.overlong_buffer={enable: true, len: 17}", "error reward.overlong_buffer.len: 17: is longer than"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, override: str, expected: str) -> None:
    assert any(expected in text for text in problems(tmp_path, override)), problems(tmp_path, override)


def test_a_layout_that_does_not_divide_the_reward_model(tmp_path: Path) -> None:
    """12 heads and 3 KV heads of the small model, whose checkpoint has its configuration one folder further."""
    write_experiment(tmp_path)
    checkpoint = tmp_path / "step-000010"
    checkpoint.mkdir()
    (checkpoint / "model").symlink_to(tmp_path / "model")
    found = problems(tmp_path, part(f"kind: model, path: {checkpoint}"), "layout.tp=2", "actor.ppo_mini_batch_size=6")
    assert any(
        "error layout.tp: 2: does not divide the 12 attention heads" in text and str(checkpoint) in text
        for text in found
    )


def test_ipo_smooths_no_labels(tmp_path: Path) -> None:
    settings = ("trainer.kind=dpo", "reward=null", "dpo.loss_type=ipo", "dpo.label_smoothing=0.1")
    expected = "error dpo.label_smoothing: 0.1: is for the loss sigmoid, and dpo.loss_type is ipo; set it to 0"
    assert problems(tmp_path, *settings) == [expected]


@pytest.mark.parametrize("kind", ["dpo", "reward_model"])
def test_pairs_are_explained(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_experiment(tmp_path)
    words = ["validate", str(file), f"trainer.kind={kind}", "reward=null", "actor.ppo_micro_batch_size_per_gpu=3"]
    assert main.main(words) == 0
    told = capsys.readouterr().out
    assert "step    12 pairs, one optimizer step" in told
    assert "a minibatch on each data-parallel rank: 12 pairs = 4 micro-batches of 3" in told


def test_unknown_loss(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'dpo.loss_type: "hinge" .*has to be one of sigmoid, ipo'):
        small_experiment(tmp_path, "dpo.loss_type=hinge")
