"""Sampling takes the turn and gives it back; a switch that went wrong is seen, mended once, or ends the run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_ranks
from tests.support.runs import metrics, succeed, write_run_experiment

TWO_RANKS = {
    "tp2": "layout.tp=2",
    "dp2": "",
    "tp2, two replicas": "layout.tp=2,rollout.tensor_model_parallel_size=1",
    "dp2, one replica": "rollout.tensor_model_parallel_size=2",
    "pp2, two replicas": "layout.pp=2,rollout.tensor_model_parallel_size=1",
}
NATIVE = ("tp2", "dp2")
# Two steps of one minibatch, with an evaluation before each and after the last; responses of 8 tokens in the probe and
# of 9 in training.
RUN = [
    "trainer.total_steps=2", "trainer.val_before_train=true", "trainer.test_freq=1", "trainer.save_last=false",
    "actor.ppo_mini_batch_size=4", "actor.ppo_epochs=1", "data.max_response_length=9",
]  # fmt: skip
TENSOR = "decoder.layers.1.self_attention.linear_proj.weight"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each rank saw, by layout."""
    folder = tmp_path_factory.mktemp("turns")
    return run_layouts(folder, {"one": ""}, 1) | run_layouts(folder, TWO_RANKS, 2)


def run_layouts(folder: Path, layouts: dict[str, str], nproc: int) -> dict[str, Any]:
    experiment = write_run_experiment(folder)
    words = [f"{name}={','.join(filter(None, [*RUN, overrides]))}" for name, overrides in layouts.items()]
    program = "tests.distributed.programs.turns"
    return run_ranks(program, "--config", experiment, "--folder", folder, "--layouts", *words, nproc=nproc)


@pytest.mark.parametrize("layout", TWO_RANKS)
def test_experience_is_the_same_whatever_the_replicas(layout: str, results: dict[str, Any]) -> None:
    """Positions, tokens and texts are those of one rank; log-probs are computed in another order."""
    [one] = results["one"]
    expected = {position: rest for position, *rest in one["samples"]}
    assert sorted(expected) == list(range(8))
    for rank in results[layout]:
        share = 4 if layout.startswith("dp2") else 8
        assert len(rank["samples"]) == share
        for position, tokens, log_probs, text in rank["samples"]:
            assert [tokens, text] == [expected[position][0], expected[position][2]]
            assert log_probs == pytest.approx(expected[position][1], abs=1e-5)
    assert {position for rank in results[layout] for position, *_ in rank["samples"]} == set(expected)


@pytest.mark.parametrize("layout", TWO_RANKS)
def test_whoever_samples_takes_the_turn_and_gives_it_back(layout: str, results: dict[str, Any]) -> None:
    evaluation = ["sync", "generate 9", "release", "score"]
    step = ["sync", "generate 9", "release", "score", "update"]
    checked = ["sync", "generate 8", *step[1:]]
    expected = [*evaluation, *checked, *evaluation, *step, *evaluation, "close rewards", "close"]
    for rank in results[layout]:
        assert rank["run"] == expected
        assert rank["engine"] == ("NativeRolloutEngine" if layout in NATIVE else "NativeLayoutEngine")


@pytest.mark.parametrize("layout", NATIVE)
def test_right_weights_pass_and_are_checked_when_due(layout: str, results: dict[str, Any]) -> None:
    for rank in results[layout]:
        checks = ["hybrid/probe_diff_mean" in step for step in rank["right"]["metrics"]]
        assert checks == [True, False, True, False]
        assert ["hybrid/probe_diff_mean" in step for step in rank["first only"]["metrics"]] == [True] + [False] * 3
        for step in (rank["right"]["metrics"][0], rank["right"]["metrics"][2]):
            assert 0 < step["hybrid/probe_diff_mean"] <= step["hybrid/probe_diff_max"] < 1e-5
            assert step["hybrid/probe_resent"] == 0


@pytest.mark.parametrize("layout", NATIVE)
def test_weights_that_were_wrong_once_are_sent_again(layout: str, results: dict[str, Any]) -> None:
    for rank in results[layout]:
        first, second = rank["wrong once"]["metrics"]
        assert first["hybrid/probe_resent"] == 1 and first["hybrid/probe_diff_mean"] < 1e-5
        assert "hybrid/probe_diff_mean" not in second
        again = ["sync", "generate 8", "release"]
        assert rank["wrong once"]["diary"] == [*again, *again, "sync", "release"]
        assert rank["wrong once"]["error"] is None


@pytest.mark.parametrize("layout", NATIVE)
def test_weights_that_stay_wrong_end_the_run_on_every_rank(layout: str, results: dict[str, Any]) -> None:
    """Only the last rank holds a wrong tensor: alone under dp, and it makes its TP peer wrong too."""
    errors = [rank["wrong always"]["error"] for rank in results[layout]]
    assert errors[0] == errors[1]
    assert f"wrong tensor: {TENSOR} (off by 0.25 at most), on rank 1" in errors[0]
    told = re.search(
        r"step 1: the rollout engine has not got the trained weights: its log-probs are on average (\S+) nats off the "
        r"trainer's, hybrid.check_limit is 0.001, though they were sent twice; .*; worst token: prompt (\d+) of train, "
        r"response token \d \(id \d+\): (\S+) in the engine, (\S+) in the trainer$",
        errors[0],
    )
    assert told is not None
    mean, engine, trainer = float(told[1]), float(told[3]), float(told[4])
    assert abs(engine - trainer) > mean > 1e-3
    for rank in results[layout]:
        assert rank["wrong always"]["metrics"] == []
        assert rank["wrong always"]["diary"] == ["sync", "generate 8", "release", "sync", "generate 8"]


@pytest.mark.parametrize("layout", NATIVE)
def test_logits_that_are_no_numbers_are_sent_again_and_named_too(layout: str, results: dict[str, Any]) -> None:
    """On the last rank alone under dp; the other one goes along."""
    for rank in results[layout]:
        first, _ = rank["no numbers once"]["metrics"]
        assert first["hybrid/probe_resent"] == 1 and first["hybrid/probe_diff_mean"] < 1e-5
        assert rank["no numbers once"]["error"] is None
        assert rank["no numbers"]["error"] == (
            "step 1: the rollout engine has not got the trained weights: its log-probs are on average inf nats off the "
            "trainer's, hybrid.check_limit is 0.001, though they were sent twice; wrong tensor: "
            f"{TENSOR} (off by 0.25 at most), on rank 1; worst token: none, for the engine's logits are no numbers"
        )
        assert rank["no numbers"]["diary"] == ["sync", "generate 8", "release", "sync", "generate 8"]


def test_an_engine_that_names_no_tensor_says_so(results: dict[str, Any]) -> None:
    for rank in results["tp2"]:
        assert (
            "though they were sent twice; the engine names no tensor; worst token: " in rank["without a name"]["error"]
        )


def test_a_received_tensor_that_was_broken_once_is_repaired_by_the_next_switch(results: dict[str, Any]) -> None:
    """With an engine that really receives: the step's bytes and seconds are those of both switches."""
    for rank in results["tp2, two replicas"]:
        once = rank["broken once"]
        first, second = once["metrics"]
        assert once["error"] is None
        assert first["hybrid/probe_resent"] == 1 and first["hybrid/probe_diff_mean"] < 1e-5
        for moved in ("received", "sent", "aliased"):
            name = f"hybrid/bytes_{moved}"
            assert first[name] == 2 * second[name] > 0
        assert first["hybrid/peak_bytes"] == second["hybrid/peak_bytes"] <= second["hybrid/extra_bytes"]
        assert first["hybrid/seconds"] > 0 and first["hybrid/extra_bytes"] == second["hybrid/extra_bytes"] > 0


@pytest.mark.parametrize("how", ["broken always", "moved always"])
def test_a_received_tensor_that_stays_broken_is_named_by_the_engine(how: str, results: dict[str, Any]) -> None:
    """Overwritten or in other memory: found by comparing what the engine has now with what training has."""
    errors = [rank[how]["error"] for rank in results["tp2, two replicas"]]
    assert errors[0] == errors[1]
    told = re.search(
        rf"though they were sent twice; wrong tensor: {re.escape(TENSOR)} \(off by (\S+) at most\), on rank 1;",
        errors[0],
    )
    assert told is not None, errors[0]
    zero, difference = (rank[how]["difference"] for rank in results["tp2, two replicas"])
    assert told[1] == f"{difference:.3g}" and difference > zero == 0
    for rank in results["tp2, two replicas"]:
        assert rank[how]["diary"] == ["sync", "generate 8", "release", "sync", "generate 8"]


@pytest.mark.slow
def test_commands_and_supervised_training_take_turns_too(tmp_path: Path) -> None:
    """Held-out scores are those of one rank, from `evaluate` and from supervised training before its first step."""
    experiment = write_run_experiment(tmp_path)
    own_layout = ["layout.tp=2", "rollout.tensor_model_parallel_size=1"]
    words = ["evaluate", experiment, "--model", tmp_path / "model"]
    one, two = (json.loads(succeed(*words, *more).out.splitlines()[-1]) for more in ([], own_layout))
    assert one == two and one["eval/held_out/response_length"] == 8
    rows = [json.dumps({"prompt": f"add {number}", "response": str(number)}) for number in range(4)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    succeed(
        "train", experiment, *own_layout, "trainer.kind=sft", f"data.train_files=[{tmp_path}/pairs.jsonl]",
        "trainer.total_steps=1", "trainer.val_before_train=true", "trainer.save_last=false",
    )  # fmt: skip
    before, after = metrics(tmp_path / "run")
    assert {name: value for name, value in before.items() if name.startswith("eval/")} == one
    assert one.keys() <= after.keys() and after["data/prompts_seen"] == 4
    words = ["generate", "--model", tmp_path / "model", "--prompt", "add 1", "add 2", "--max-tokens", 4]
    answers = [succeed(*words, "--tp", tp).out for tp in (1, 2)]
    assert answers[0] == answers[1] and answers[0].count("> ") == 2
