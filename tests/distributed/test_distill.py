"""From preferences to PPO: token rewards of a DPO policy, pairs beside fresh responses, and a file of three stages."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.programs.distill import SAMPLES
from tests.support.ranks import run_ranks
from tests.support.runs import learning, megappo, metrics, status, succeed
from tests.support.tiny_models import tiny_model, tiny_tokenizer

TEMPERATURE = 0.8
BETA, WEIGHT = 0.25, 2.0
EXPERIMENT = """\
model: {{path: {folder}/start, dtype: float32, layers: torch}}
data:
  train_files: [{folder}/pairs.jsonl]
  answer_key: null
  train_batch_size: 4
  max_prompt_length: 40
  max_response_length: 12
rollout: {{n: 2, temperature: {temperature}}}
reward: {{parts: [{{name: dense, kind: implicit, policy: {folder}/policy, beta: {beta}}}]}}
actor:
  ppo_mini_batch_size: 4
  ppo_micro_batch_size_per_gpu: 2
  use_kl_loss: true
  optim: {{lr: 1.0e-2}}
replay: {{pairs: [{folder}/pairs.jsonl], fraction: 0.5}}
trainer: {{run_dir: {folder}/unused, total_steps: 4}}
observe: {{tensorboard: false, console: false}}
"""
CHAIN = """\
model: {{path: {folder}/start, dtype: float32, layers: torch}}
data:
  train_files: [{folder}/pairs.jsonl]
  answer_key: null
  response_key: chosen
  train_batch_size: 4
  max_prompt_length: 40
  max_response_length: 12
actor: {{ppo_micro_batch_size_per_gpu: 2, optim: {{lr: 1.0e-3}}}}
trainer: {{run_dir: {folder}/chain, total_steps: 2}}
observe: {{tensorboard: false}}
stages:
  sft: {{trainer: {{kind: sft, save_last: false}}}}
  dpo: {{model: {{path: "stage:sft"}}, trainer: {{kind: dpo, save_last: false}}}}
  ppo:
    model: {{path: "stage:sft"}}
    rollout: {{n: 2}}
    actor: {{ppo_mini_batch_size: 2, use_kl_loss: true}}
    data: {{answer_key: answer, val_files: [{folder}/held_out.jsonl]}}
    reward:
      parts:
        - {{name: dense, kind: implicit, policy: "stage:dpo"}}
        - {{name: same, kind: exact_match, evaluation_only: true}}
    replay: {{pairs: [{folder}/pairs.jsonl], fraction: 0.25}}
    trainer: {{save_freq: 1}}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distill")
    for name, seed in (("start", 0), ("policy", 1)):
        tiny_tokenizer(tiny_model(folder / name, "qwen3", seed=seed))
    rows = [
        {"prompt": "add " * (1 + n % 3) + str(n), "chosen": str(n + 1) * (1 + n % 2), "rejected": "no" * (1 + n % 4)}
        for n in range(6)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    # Training prompts have no answer, held-out ones do.
    (folder / "held_out.jsonl").write_text(json.dumps({"prompt": "add 9", "answer": "10"}) + "\n")
    settings = {"folder": folder, "temperature": TEMPERATURE, "beta": BETA}
    (folder / "experiment.yaml").write_text(EXPERIMENT.format(**settings))
    (folder / "chain.yaml").write_text(CHAIN.format(**settings))
    return folder


def run(folder: Path, nproc: int, *overrides: str) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = run_ranks(
        "tests.distributed.programs.distill", "--config", folder / "experiment.yaml", "--policy", folder / "policy",
        "--overrides", *overrides, nproc=nproc,
    )  # fmt: skip
    return told


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    return run(folder, 1)[0]


class Reference:
    """Log-probs by transformers in float64."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)

    @torch.no_grad()
    def log_probs(self, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float = 1.0) -> list[float]:
        """Of each response token."""
        ids = torch.tensor([[*prompt, *response]])
        table = (self.model(ids).logits[0] / temperature).log_softmax(-1)
        places = range(len(prompt), ids.shape[1])
        return [float(table[place - 1, ids[0, place]]) for place in places]


def expected_rewards(folder: Path) -> list[list[float]]:
    policy, start = Reference(folder / "policy"), Reference(folder / "start")
    return [
        [
            WEIGHT * BETA * (high - low) if mask is None or mask[place] else 0.0
            for place, (high, low) in enumerate(
                zip(policy.log_probs(prompt, response), start.log_probs(prompt, response), strict=True)
            )
        ]
        for prompt, response, mask in SAMPLES
    ]


def test_token_rewards_are_the_difference_of_log_probs(folder: Path, one: dict[str, Any]) -> None:
    expected = expected_rewards(folder)
    assert any(abs(value) > 0.1 for row in expected for value in row), "the two models differ"
    for row, values in zip(expected, one["dense"]["token_scores"], strict=True):
        assert values == pytest.approx(row, abs=1e-5)
    assert one["dense"]["token_scores"][1] == []
    assert one["dense"]["token_scores"][2][1:3] == [0.0, 0.0]
    assert one["dense"]["scores"] == [0.0] * len(SAMPLES)
    # Reported before weighting.
    assert one["dense"]["parts"] == pytest.approx([sum(row) / WEIGHT for row in expected], abs=1e-5)


def test_at_end_gives_the_same_sum_once(folder: Path, one: dict[str, Any]) -> None:
    sums = [sum(row) for row in expected_rewards(folder)]
    assert one["at_end"]["scores"] == pytest.approx(sums, abs=1e-5)
    assert one["at_end"]["token_scores"] is None
    assert one["at_end"]["parts"] == pytest.approx(one["dense"]["parts"], abs=1e-6)


def test_pairs_have_the_starting_policy_s_log_probs(folder: Path, one: dict[str, Any]) -> None:
    start = Reference(folder / "start")
    assert len(one["pairs"]) == 12
    for pair in one["pairs"]:
        expected = start.log_probs(tuple(pair["prompt"]), tuple(pair["response"]), TEMPERATURE)
        assert pair["log_probs"] == pytest.approx(expected, abs=1e-5)


def test_pairs_stand_beside_fresh_responses(folder: Path, one: dict[str, Any]) -> None:
    policy, start = Reference(folder / "policy"), Reference(folder / "start")
    first, second = one["steps"]
    assert first["drawn"] != second["drawn"]
    for step in one["steps"]:
        drawn = dict(step["drawn"])
        # Half of the step's eight sequences, evenly spread.
        assert sorted(drawn) == [1, 3, 5, 7]
        assert step["metrics"]["replay/drawn"] == 4
        rewards = 0.0
        for position, number in drawn.items():
            pair = one["pairs"][number]
            prompt, response = tuple(pair["prompt"]), tuple(pair["response"])
            assert step["token_ids"][position] == [*prompt, *response]
            before = [0.0] * len(prompt)
            assert step["old"][position] == pytest.approx([*before, *pair["log_probs"]], abs=1e-6)
            assert step["reference"][position] == pytest.approx([*before, *pair["log_probs"]], abs=1e-5)
            differences = zip(policy.log_probs(prompt, response), start.log_probs(prompt, response), strict=True)
            expected = [BETA * (high - low) for high, low in differences]
            assert step["token_scores"][position] == pytest.approx([*before, *expected], abs=1e-5)
            rewards += sum(expected)
        assert step["metrics"]["replay/reward"] == pytest.approx(rewards / 4, abs=1e-5)
        for position in (0, 2, 4, 6):
            prompt, response, _ = SAMPLES[position]
            assert step["token_ids"][position] == [*prompt, *response]
            assert step["old"][position] == step["fresh_old"][position]
            assert step["old"][position] == pytest.approx(step["now"][position], abs=1e-6)


def test_the_ratio_of_pairs_is_taken_to_the_starting_policy(one: dict[str, Any]) -> None:
    """At the first step it is 1; after an update it is not, while that of fresh responses is again."""
    first, second = (
        [[*zip(*rows, strict=True)] for rows in zip(s["old"], s["now"], strict=True)] for s in one["steps"]
    )
    moved = [[abs(old - now) for old, now in rows] for rows in second]
    assert max(abs(old - now) for rows in first for old, now in rows) <= 1e-5
    assert max(max(moved[position]) for position in (0, 2, 4, 6)) <= 1e-6
    assert min(max(moved[position]) for position in (1, 3, 5, 7)) > 1e-3


@pytest.mark.parametrize("layout", [("layout.tp=2", "layout.sequence_parallel=true"), ("layout.dp=2",)], ids=str)
def test_two_ranks_give_what_one_gives(folder: Path, one: dict[str, Any], layout: tuple[str, ...]) -> None:
    two = run(folder, 2, *layout)
    if layout[0] == "layout.tp=2":
        assert two[0]["dense"] == two[1]["dense"]
        two = two[:1]
    for rank in two:
        mine = rank["samples"]
        for place, position in enumerate(mine):
            for name in ("dense", "at_end"):
                assert rank[name]["scores"][place] == pytest.approx(one[name]["scores"][position], abs=1e-5)
            ours, theirs = rank["dense"]["token_scores"][place], one["dense"]["token_scores"][position]
            assert ours == pytest.approx(theirs, abs=1e-5)
        for ours, theirs in zip(rank["pairs"], one["pairs"], strict=True):
            assert ours["log_probs"] == pytest.approx(theirs["log_probs"], abs=1e-5)
        for ours, theirs in zip(rank["steps"], one["steps"], strict=True):
            assert ours["drawn"] == theirs["drawn"]
            assert ours["metrics"] == pytest.approx(theirs["metrics"], abs=1e-5)
            for place, position in enumerate(mine):
                assert ours["token_ids"][place] == theirs["token_ids"][position]
                assert ours["advantages"][place] == pytest.approx(theirs["advantages"][position], abs=1e-3)


@pytest.mark.slow
def test_three_stages_from_a_file_of_pairs(folder: Path) -> None:
    file, chain = folder / "chain.yaml", folder / "chain"
    succeed("train", file, "--stage", "sft")
    sft = (chain / "sft" / "metrics.jsonl").read_bytes()
    refused = megappo("train", file)
    assert refused.code == 2 and "holds a run already" in refused.err
    whole = succeed("train", file, "--resume")
    assert f"stage sft: done in {chain}/sft" in whole.out
    for stage in ("sft", "dpo", "ppo"):
        assert status(chain / stage)["state"] == "done"
        assert [line["step"] for line in metrics(chain / stage)][-2:] == [1, 2]
    assert (chain / "sft" / "metrics.jsonl").read_bytes() == sft
    ppo = metrics(chain / "ppo")[-1]
    assert "reward/parts/same" not in ppo and 0 <= ppo["eval/held_out/exact_match"] <= 1
    assert ppo["reward/parts/dense"] != 0 and ppo["replay/drawn"] == 2 and ppo["actor/grad_norm"] > 0

    # As if it had been stopped after the first step of the last stage.
    expected = learning(chain / "ppo", after=1)
    checkpoints = chain / "ppo" / "checkpoints"
    shutil.rmtree(checkpoints / "step-000002")
    (checkpoints / "latest").unlink()
    (checkpoints / "latest").symlink_to("step-000001")
    (chain / "ppo" / "status.json").write_text(json.dumps(status(chain / "ppo") | {"state": "stopped"}))
    (chain / "ppo" / "metrics.jsonl").unlink()
    resumed = succeed("train", file, "--resume")
    assert f"stage dpo: done in {chain}/dpo" in resumed.out
    assert learning(chain / "ppo", after=1) == expected

    changed = megappo("train", file, "--resume", "stages.dpo.dpo.beta=0.3")
    assert changed.code == 2 and "a finished run of other settings" in changed.err
