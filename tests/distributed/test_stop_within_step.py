"""A run that is asked to stop between the batches of one step of dynamic sampling goes on with the same numbers."""

import json
from pathlib import Path

import pytest

from megappo.errors import ExitCode
from tests.support.runs import learning, megappo, metrics, reward, status, succeed, write_run_experiment

SETTINGS = [
    "layout.dp=2", "trainer.total_steps=3", "trainer.test_freq=0", "data.val_files=[]", "data.prefetch=true",
    "algorithm.filter_groups.enable=true", "replay.size=20", "replay.fraction=0.5",
]  # fmt: skip
CALLS_OF_A_BATCH = 4 * 2


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_experiment(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def whole(experiment: Path) -> Path:
    run = experiment.parent / "whole"
    succeed("train", experiment, *SETTINGS, reward("parity"), f"trainer.run_dir={run}")
    batches = [line["filter_groups/num_gen_batches"] for line in metrics(run)]
    assert batches[0] > 1 and batches[1] > 1, "a signal can only be heard where a step has a second batch"
    return run


def events(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def test_the_step_is_made_anew_with_the_same_numbers(experiment: Path, whole: Path) -> None:
    """The signal comes while the first batch of step 1 is scored, then, in the run resumed, of step 2."""
    run = experiment.parent / "parts"
    words = ["train", experiment, *SETTINGS, reward("parity_and_stop"), f"trainer.run_dir={run}", "--resume"]

    def stopped(name: str, at_call: int) -> None:
        environment = {"CALLS_FILE": str(experiment.parent / name), "STOP_AT_CALL": str(at_call)}
        finished = megappo(*words, **environment)
        assert finished.code == ExitCode.STOPPED_AFTER_SAVING, finished.err

    stopped("first", 1)
    assert (status(run)["state"], status(run)["step"], status(run)["exit_code"]) == ("stopped", 0, 75)
    assert not list((run / "checkpoints").glob("step-*")) and metrics(run) == []

    whole_steps = metrics(whole)
    stopped("second", CALLS_OF_A_BATCH * int(whole_steps[0]["filter_groups/num_gen_batches"]) + 1)
    assert (status(run)["state"], status(run)["step"], status(run)["exit_code"]) == ("stopped", 1, 75)
    state = json.loads((run / "checkpoints" / "latest" / "trainer.json").read_text())
    # 14 prompts in batches of 4: three batches an epoch.
    epoch, batch = divmod(int(whole_steps[0]["filter_groups/num_gen_batches"]), 3)
    assert (state["step"], state["data"]["epoch"], state["data"]["index"]) == (1, epoch, 4 * batch)
    assert [one["step"] for one in events(run) if one["event"] == "stopped"] == [0, 1]
    assert "in the middle of step 2" in str([one["reason"] for one in events(run) if one["event"] == "stopped"][1])
    told = [one for one in events(run) if one["event"] == "further_batch" and one["step"] == 2]
    assert [(one["batches"], one["needed"]) for one in told] == [(1, 4)], "heard after the first batch"

    succeed("train", experiment, *SETTINGS, reward("parity"), f"trainer.run_dir={run}", "--resume")
    ours, expected = learning(run), learning(whole)
    assert [line["step"] for line in ours] == [1, 2, 3] and len(expected[-1]) > 40
    for mine, theirs in zip(ours, expected, strict=True):
        differing = {name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)}
        assert not differing, f"step {mine['step']}: {sorted(differing)}"
