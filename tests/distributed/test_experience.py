"""Turns with an environment against a plain forward; runs with replay, dynamic sampling and prompt sets, resumed."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.runs import REWARDS, write_run_experiment
from tests.support.tiny_models import tiny_model

LAYOUTS = {
    "dp2": [],
    "tp2": ["layout.tp=2"],
    "tp2 replicas": ["layout.tp=2", "rollout.tensor_model_parallel_size=1"],
}
TURNS = [
    "rollout.multi_turn.enable=true", "rollout.multi_turn.environment=tests.support.environments:Echo",
    "rollout.multi_turn.max_turns=4", "rollout.multi_turn.max_tokens_per_turn=9", "data.max_response_length=40",
    "actor.use_kl_loss=false", "actor.ppo_mini_batch_size=4", "rollout.n=4", "data.prefetch=true",
]  # fmt: skip
RUN = [
    "data.train_files=[]", "trainer.total_steps=3", "trainer.test_freq=1", "trainer.save_freq=1",
    "trainer.best_metric=eval/odd/reward", "replay.size=20", "replay.fraction=0.5",
    "algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=3", "data.prefetch=true",
    "algorithm.filter_groups.when_short=fill", "trainer.evaluation.n=2", "trainer.evaluation.temperature=1",
    "observe.samples_freq=1", "observe.samples_per_step=8",
]  # fmt: skip


def parts(*names: str) -> str:
    listed = ", ".join(f"{{name: {name}, kind: function, function: '{REWARDS}:{name}'}}" for name in names)
    return f"reward.parts=[{listed}]"


def sets(folder: Path) -> str:
    files = f"files: [{folder}/train.jsonl], val_files: [{folder}/held_out.jsonl]"
    return (
        f"data.sets=[{{name: odd, {files}, reward: [parity], weight: 3, prompt_template: 'q {{prompt}}'}}, "
        f"{{name: wide, {files}, reward: [spread]}}]"
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experience")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    experiment = write_run_experiment(folder)
    runs = {f"turns {name}": {"kind": "turns", "overrides": [*TURNS, *own]} for name, own in LAYOUTS.items()}
    tiny_model(folder / "larger", "llama", vocab_size=192, seed=1)
    for name in ("dp2", "tp2"):
        kl = ["actor.use_kl_loss=true", f"ref.path={folder}/larger"]
        runs[f"turns larger reference {name}"] = {"kind": "turns", "overrides": [*TURNS, *LAYOUTS[name], *kl]}
    # A held-out file of no set beside them.
    whole = [*RUN, sets(folder), f"data.val_files=[{folder}/held_out.jsonl]", parts("parity", "spread")]
    runs["run dp2"] = {"kind": "run", "overrides": whole}
    own = ["layout.tp=2", "replay.storage=disk", "trainer.max_checkpoints=1"]
    runs["run tp2"] = {"kind": "run", "overrides": [*whole, *own]}
    checkpoint = folder / "run dp2" / "checkpoints" / "step-000001"
    runs["resumed dp2"] = {"kind": "run", "overrides": [*whole, f"trainer.resume={checkpoint}"]}
    (folder / "runs.json").write_text(json.dumps(runs))
    program = "tests.distributed.programs.experience"
    return run_ranks(
        program, "--config", experiment, "--folder", folder, "--runs", folder / "runs.json", nproc=2
    )  # fmt: skip


def rows_of(results: dict[str, Any], layout: str) -> dict[int, dict[str, Any]]:
    """The sequences of all ranks by position; ranks that have the same one agree on it."""
    rows: dict[int, dict[str, Any]] = {}
    for rank in results[f"turns {layout}"]:
        for row in rank["rows"]:
            assert rows.setdefault(row["position"], row) == row
    return rows


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_of_the_policy_have_the_log_probs_of_a_plain_forward(
    layout: str, results: dict[str, Any], folder: Path
) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    rows = rows_of(results, layout)
    assert sorted(rows) == list(range(16))
    assert max(row["num_turns"] for row in rows.values()) > 2
    for row in rows.values():
        expected = plain_log_probs(model, row)
        assert row["rollout"] == pytest.approx(expected, abs=1e-5)
        assert row["old"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("layout", ["dp2", "tp2"])
def test_a_reference_with_a_larger_vocabulary_has_the_log_probs_of_a_plain_forward(
    layout: str, results: dict[str, Any], folder: Path
) -> None:
    """192 columns, where the actor has 128: all of them share the probability."""
    from transformers import AutoModelForCausalLM

    actor, reference = (AutoModelForCausalLM.from_pretrained(folder / name).eval() for name in ("model", "larger"))
    rows = rows_of(results, f"larger reference {layout}")
    assert sorted(rows) == list(range(16))
    for row in rows.values():
        assert row["old"] == pytest.approx(plain_log_probs(actor, row), abs=1e-5)
        assert row["reference"] == pytest.approx(plain_log_probs(reference, row), abs=1e-5)


def plain_log_probs(model: Any, row: dict[str, Any]) -> list[float]:
    """Of the response's own tokens, 0 elsewhere."""
    prompt, response, mask = row["prompt_ids"], row["response_ids"], row["mask"]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + response])).logits[0]
    log_probs = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]
    found: list[float] = torch.where(torch.tensor(mask), log_probs, 0.0).tolist()
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_environment_speaks_where_the_mask_is_false(layout: str, results: dict[str, Any]) -> None:
    """Its replies are in the text after each turn; limits hold; the layouts have the same responses."""
    rows = rows_of(results, layout)
    same = rows_of(results, "dp2")
    for position, row in rows.items():
        expected = spoken = ""
        turn = 0
        for token, own in zip(row["response_ids"], row["mask"], strict=True):
            if own:
                assert spoken == expected
                turn += 4 <= token <= 99  # a character; the model knows more tokens than the tokenizer
                expected = spoken = ""
            else:
                expected = expected or f"[{turn}|{row['index']}]"
                spoken += chr(28 + token)
                turn = 0
        assert spoken == expected
        assert row["num_turns"] <= 4 and len(row["response_ids"]) <= 40
        assert row["finish_reason"] != "error" or row["text"].endswith(("a", "e", "o", "u"))
        assert [row["response_ids"], row["mask"]] == [same[position]["response_ids"], same[position]["mask"]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_peaks_are_told_when_the_engine_sleeps(layout: str, results: dict[str, Any]) -> None:
    assert all(rank["peaks are told of the engine"] is True for rank in results[f"turns {layout}"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_of_the_environment_carry_no_loss(layout: str, results: dict[str, Any]) -> None:
    """Their advantages were NaN; the loss is that of A = 1 on the policy's tokens at ratio 1."""
    for rank in results[f"turns {layout}"]:
        assert rank["update"]["actor/pg_loss"] == pytest.approx(-1.0, abs=1e-5)
        assert 0 < rank["update"]["actor/grad_norm"] < float("inf")
        first = results["turns dp2"][0]["update"]["actor/grad_norm"]
        assert rank["update"]["actor/grad_norm"] == pytest.approx(first, rel=1e-4)
    rows = rows_of(results, layout).values()
    found = results[f"turns {layout}"][0]["metrics"]
    assert found["rollout/turns"] == sum(row["num_turns"] for row in rows) / 16
    assert found["rollout/environment_tokens"] == sum(row["mask"].count(False) for row in rows) / 16
    assert found["rollout/environment_errors"] == sum(row["finish_reason"] == "error" for row in rows) > 0


def lines(folder: Path, run: str) -> list[dict[str, float]]:
    file = folder / run / "metrics.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()]
    timed = ("time/", "perf/", "hybrid/seconds", "hybrid/turn_seconds", "hybrid/peak", "hybrid/held")
    timed += ("rollout/tokens_per_second", "wall_time")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in found]


def test_a_resumed_run_repeats_every_number(results: dict[str, Any], folder: Path) -> None:
    whole = lines(folder, "run dp2")
    assert [line["step"] for line in whole] == [1, 2, 3]
    resumed = lines(folder, "resumed dp2")
    assert [line["step"] for line in resumed] == [2, 3]
    # The first switch of a process is probed, whatever its step.
    for ours, theirs in zip(resumed, whole[1:], strict=True):
        assert {name: value for name, value in ours.items() if "probe" not in name} == theirs


def test_layouts_replay_and_filter_alike(results: dict[str, Any], folder: Path) -> None:
    names = (
        "replay/size", "replay/drawn", "replay/distinct", "replay/score", "replay/age", "filter_groups/kept",
        "filter_groups/num_gen_batches", "data/prompts_seen", "reward/score", "actor/pg_loss", "critic/vf_loss",
        "reward/sets/odd", "eval/odd/reward", "eval/wide/reward", "eval/held_out/reward",
    )  # fmt: skip
    for one, other in zip(lines(folder, "run dp2"), lines(folder, "run tp2"), strict=True):
        assert "eval/held_out/reward" in one
        assert {name: one.get(name) for name in names} == pytest.approx(
            {name: other.get(name) for name in names}, abs=1e-4
        )


def test_replay_takes_half_of_the_places(results: dict[str, Any], folder: Path) -> None:
    for number, line in enumerate(lines(folder, "run dp2"), start=1):
        assert line["replay/size"] == min(8 * number, 20)
        assert line["replay/drawn"] in (0, 4)
        assert 0 <= line["replay/age"] <= 2
    assert max(line["replay/age"] for line in lines(folder, "run dp2")) > 0


def test_groups_that_differ_are_trained_on_and_all_prompts_are_counted(results: dict[str, Any], folder: Path) -> None:
    seen = 0
    for line in lines(folder, "run dp2"):
        step, batches = int(line["step"]), int(line["filter_groups/num_gen_batches"])
        seen += 4 * batches
        assert line["data/prompts_seen"] == seen
        assert line["filter_groups/kept"] + line["filter_groups/uniform"] == 4 * batches
        rows = [
            json.loads(row)
            for row in (folder / "run dp2" / "samples" / f"step-{step:06d}.jsonl").read_text().splitlines()
        ]
        assert [row["position"] for row in rows] == list(range(8))
        groups = defaultdict(list)
        for row in rows:
            groups[row["position"] // 2].append(row["score"])
            # Each set's own reward, and its own template.
            assert list(row["parts"]) == (["parity"] if row["source"] == "odd" else ["spread"])
            assert row["prompt"].startswith("q ") == (row["source"] == "odd")
        uniform = sum(len(set(scores)) == 1 for scores in groups.values())
        assert uniform == max(0, 4 - line["filter_groups/kept"])
        assert batches == 1 or uniform == 0 or batches == 3


def test_the_best_checkpoint_is_kept_beside_the_newest(results: dict[str, Any], folder: Path) -> None:
    scores = {int(line["step"]): line["eval/odd/reward"] for line in lines(folder, "run tp2")}
    best = max(scores, key=lambda step: (scores[step], -step))
    checkpoints = folder / "run tp2" / "checkpoints"
    assert (checkpoints / "best").resolve().name == f"step-{best:06d}"
    assert (checkpoints / "latest").resolve().name == "step-000003"
    kept = {path.name for path in checkpoints.iterdir() if path.name.startswith("step-")}
    assert kept == {f"step-{best:06d}", "step-000003"}
