"""Rules of implicit rewards, parts that only measure, and pairs beside fresh responses."""
# ruff: noqa: E501  a line of a table is one case, with the whole message

import json
from pathlib import Path

import pytest

from megappo.config.checks import check_experiment
from tests.support.experiments import MODEL, small_experiment

DENSE = "{{name: dense, kind: implicit, policy: {folder}/model{more}}}"


def found(folder: Path, *overrides: str) -> list[str]:
    config = small_experiment(folder, *overrides)
    return [f"{problem.severity.value} {problem.text()}" for problem in check_experiment(config)]


def parts(folder: Path, more: str = "") -> str:
    return f"reward.parts=[{DENSE.format(folder=folder, more=more)}]"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (", reference: nowhere", 'error reward.parts.0.reference: "nowhere": there is no such folder'),
        (", path: x", 'error reward.parts.0.path: "x": kind implicit takes no path; set kind to model, or drop it'),
        (", evaluation_only: true", "error reward.parts.0.evaluation_only: true: is true for every part, and training needs a reward; false, or add a part"),
        (", batch_size: 3", "error reward.parts.0.batch_size: 3: is for parts of kind http, and this one is of kind implicit; leave it out"),
    ],
)  # fmt: skip
def test_mistakes_of_an_implicit_reward(tmp_path: Path, more: str, expected: str) -> None:
    assert any(problem.startswith(expected) for problem in found(tmp_path, parts(tmp_path, more)))


def test_an_implicit_reward_needs_a_policy_that_reads_the_actor_s_sequences(tmp_path: Path) -> None:
    assert found(tmp_path, parts(tmp_path, ", beta: 0.5, at_end: true, micro_batch_size_per_gpu: 4")) == []
    missing = found(tmp_path, "reward.parts=[{name: dense, kind: implicit}]")
    assert missing == [
        "error reward.parts.0.policy: is missing, and kind implicit needs it; for example runs/my-dpo/hf/latest"
    ]
    other = found(tmp_path, "reward.parts.0.beta=2.0")
    assert other == [
        "error reward.parts.0.beta: 2.0: is for parts of kind implicit, and this one is of kind exact_match; leave it out"
    ]
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": 20}))
    (problem,) = found(tmp_path, f"reward.parts=[{{name: dense, kind: implicit, policy: {tmp_path}/short}}]")
    assert "was made for 20 tokens, and prompt and response have up to 32" in problem


def test_pairs_beside_fresh_responses(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text("{}\n")
    pairs = f"replay.pairs=[{tmp_path}/pairs.jsonl]"
    assert found(tmp_path, pairs) == []
    assert "there is no such file" in found(tmp_path, "replay.pairs=[a.jsonl]")[0]
    assert "set it to 0, or leave the pairs out" in found(tmp_path, pairs, "replay.size=8")[0]
    grouped = found(tmp_path, pairs, "algorithm.adv_estimator=grpo", "rollout.n=2")
    assert grouped[0].startswith("error replay.pairs: ") and "draws are single sequences" in grouped[0]
