"""Runs that are stopped and go on: the same numbers to the bit, on other layouts to rounding, and what is refused."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megappo.errors import ExitCode
from tests.support.checkpoints import same_bits, saved_tensors
from tests.support.runs import learning, megappo, reward, status, succeed, write_run_experiment

Runs = Callable[[str], tuple[Path, Path]]
CALLS_BEFORE_STEP_5 = 4 * 8 + 4
"""Of the reward: 4 prompts × 2 responses a step, and 4 held-out prompts after the fourth."""
LAYOUTS = {"tp2": ["layout.tp=2", "layout.sequence_parallel=true"], "dp2": ["layout.dp=2"], "pp2": ["layout.pp=2"]}


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_experiment(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def runs(experiment: Path) -> Runs:
    """(uninterrupted run, run that was stopped after step 5 and resumed) of a layout, made when first asked for."""
    return functools.cache(functools.partial(whole_and_resumed, experiment))


def whole_and_resumed(experiment: Path, layout: str) -> tuple[Path, Path]:
    whole, parts = experiment.parent / f"whole-{layout}", experiment.parent / f"parts-{layout}"
    words = ["train", experiment, *LAYOUTS[layout], "trainer.export_hf=true"]
    succeed(*words, f"trainer.run_dir={whole}", "trainer.save_freq=3", "trainer.max_checkpoints=2")

    words += [f"trainer.run_dir={parts}"]
    calls = experiment.parent / f"calls-{layout}"
    environment = {"CALLS_FILE": str(calls), "STOP_AT_CALL": str(CALLS_BEFORE_STEP_5 + 1)}
    stopped = megappo(*words, reward("spread_and_stop"), **environment)
    assert stopped.code == ExitCode.STOPPED_AFTER_SAVING, stopped.err
    assert (status(parts)["state"], status(parts)["step"], status(parts)["exit_code"]) == ("stopped", 5, 75)

    leave_half_written(parts / "checkpoints")
    resumed = succeed(*words, "--resume")
    assert "going on after step 5" in resumed.out
    return whole, parts


def leave_half_written(checkpoints: Path) -> None:
    """What crashes in later saves leave: a folder under its first name, one that lost its last file, and a complete one
    without its name."""
    for name in ("step-000007.partial", "step-000009"):
        (checkpoints / name / "actor").mkdir(parents=True)
        (checkpoints / name / "trainer.json").write_text('{"step": 9}')
    (checkpoints / "step-000005").rename(checkpoints / "step-000005.partial")


@pytest.mark.parametrize("layout", ["tp2", pytest.param("dp2", marks=pytest.mark.slow)])
def test_resumed_run_is_the_same_to_the_bit(runs: Runs, layout: str) -> None:
    whole, parts = runs(layout)
    ours, expected = learning(parts), learning(whole)
    assert [line["step"] for line in ours] == list(range(1, 11))
    assert len(expected[-1]) > 40, "the comparison has lost its metrics"
    for mine, theirs in zip(ours, expected, strict=True):
        differing = {name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)}
        assert not differing, f"step {mine['step']}: {sorted(differing)}"
    assert {line["data/epoch"] for line in ours} == {0, 1, 2, 3}
    assert len({line["kl/reward_coef"] for line in ours}) == 10, "the coefficient moves with every step"

    exported, reference = (load_file(run / "hf" / "latest" / "model.safetensors") for run in (parts, whole))
    assert exported.keys() == reference.keys() and all(
        torch.equal(exported[name], reference[name]) for name in reference
    )


@pytest.mark.parametrize("layout", ["tp2", "dp2"])
def test_last_checkpoints_are_the_same_to_the_bit(runs: Runs, layout: str) -> None:
    """Weights and optimizer state of both roles."""
    resumed, expected = (saved_tensors(run / "checkpoints" / "step-000010") for run in reversed(runs(layout)))
    assert {key.partition("/")[0] for key in expected} == {"actor", "critic"}
    assert sum("exp_avg_sq" in key for key in expected) > 10 and same_bits(resumed, expected)


def test_newest_checkpoints_are_kept(runs: Runs) -> None:
    """Saved after 3, 6, 9 and 10, two kept; `latest` is a link that was put in place whole."""
    whole, parts = runs("tp2")
    folder = whole / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-000009", "step-000010"]
    assert (folder / "latest").is_symlink() and (folder / "latest").readlink() == Path("step-000010")
    assert (parts / "checkpoints" / "step-000005" / "manifest.json").exists()
    assert not (parts / "checkpoints" / "step-000007.partial").exists(), "what a crash left half written"
    events = [json.loads(line)["event"] for line in (parts / "events.jsonl").read_text().splitlines()]
    assert events == ["checkpoint", "stopped", "resumed", "checkpoint"]
    assert (status(parts)["state"], status(parts)["step"], status(parts)["exit_code"]) == ("done", 10, 0)


@pytest.mark.parametrize("layout", ["pp2", "dp2"])
def test_checkpoint_goes_on_in_another_layout(experiment: Path, runs: Runs, layout: str) -> None:
    """Steps 6 and 7 from the checkpoint of tp 2, against tp 2 going on: weights and optimizer state were resharded."""
    parts, run = experiment.parent / "parts-tp2", experiment.parent / f"resharded-{layout}"
    resume = f"trainer.resume={parts}/checkpoints/step-000005"
    succeed(
        "train",
        experiment,
        *LAYOUTS[layout],
        f"trainer.run_dir={run}",
        resume,
        "trainer.total_steps=7",
        "data.val_files=[]",
    )
    ours, expected = learning(run), learning(parts)
    assert [line["step"] for line in ours] == [6, 7]
    for mine, theirs in zip(ours, expected[5:7], strict=True):
        for name in mine:
            if not name.startswith("hybrid/"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-4), f"step {mine['step']}, {name}"


def test_longer_run_with_another_rate_follows_the_configuration(experiment: Path, runs: Runs) -> None:
    """4 optimizer steps a step, 44 in all, 6 of them warm-up: step 11 makes those from 40 on."""
    _, parts = runs("tp2")
    run = experiment.parent / "longer"
    changes = ["trainer.total_steps=11", "actor.optim.lr=5e-4", "actor.optim.lr_decay_steps=null", "data.val_files=[]"]
    succeed("train", experiment, f"trainer.run_dir={run}", f"trainer.resume={parts}/checkpoints/step-000010", *changes)
    (line,) = learning(run)
    rates = [5e-4 * 0.5 * (1 + math.cos(math.pi * (number - 6) / 38)) for number in range(40, 44)]
    assert line["step"] == 11 and line["actor/lr"] == pytest.approx(sum(rates) / 4, rel=1e-9)


def test_complete_run_has_nothing_to_resume_and_no_shorter_end(experiment: Path, runs: Runs) -> None:
    """It exports again and is done; one that would end before its checkpoint is refused, and saves nothing. Of which
    evaluation was the best the checkpoint knows nothing, and a link that says so does not stay."""
    _, parts = runs("tp2")
    words = ["train", experiment, f"trainer.run_dir={parts}", "trainer.export_hf=true", "--resume"]
    weights = parts / "hf" / "step-000010" / "model.safetensors"
    before = weights.read_bytes()
    best = parts / "checkpoints" / "best"
    best.symlink_to("step-000005")
    assert "done after step 10" in succeed(*words).out
    assert best.readlink() == Path("step-000005"), "a run that asks for no best one leaves the link alone"
    assert "done after step 10" in succeed(*words, "trainer.best_metric=eval/held_out/reward").out
    assert not best.is_symlink()
    assert weights.read_bytes() == before and len(learning(parts)) == 10

    refused = megappo(*words, "trainer.total_steps=9")
    assert refused.code == ExitCode.BAD_INPUT and "Traceback" not in refused.err
    assert "the run would end after step 9" in refused.err and "set trainer.total_steps=10 or more" in refused.err
    assert sorted(path.name for path in (parts / "checkpoints").glob("step-*10")) == ["step-000010"]
    assert not (parts / "checkpoints" / "step-000009" / "manifest.json").exists()


def test_damaged_weights_are_refused(experiment: Path, runs: Runs) -> None:
    _, parts = runs("tp2")
    checkpoint = parts / "checkpoints" / "step-000010"
    victim = sorted((checkpoint / "critic").glob("*.distcp"))[0]
    flip_byte(victim)
    words = ["train", experiment, *LAYOUTS["tp2"], f"trainer.run_dir={parts}", "trainer.total_steps=11", "--resume"]
    refused = megappo(*words)
    converted = megappo("convert", "--from", checkpoint, "--to", parts / "never-written")
    flip_byte(victim)
    expected = f"error: {checkpoint}: the file critic/{victim.name} is damaged; resume from another checkpoint\n"
    for finished in (refused, converted):
        assert finished.code == ExitCode.BAD_INPUT
        assert finished.err.endswith(expected) and "Traceback" not in finished.err
    assert (status(parts)["state"], status(parts)["step"]) == ("failed", 10)


def flip_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_pointer_is_replaced_in_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no moment is there no `latest`: a crash before the last call leaves the old one."""
    from megappo.trainer import checkpoint

    for name in ("step-000003", "step-000005"):
        (tmp_path / name).mkdir()
    latest = tmp_path / "latest"
    checkpoint.point_to(latest, tmp_path / "step-000003")
    with monkeypatch.context() as crash:
        crash.setattr(checkpoint.os, "replace", lambda *paths: pytest.fail("no power"))
        with pytest.raises(pytest.fail.Exception):
            checkpoint.point_to(latest, tmp_path / "step-000005")
    assert latest.readlink() == Path("step-000003")
    checkpoint.point_to(latest, tmp_path / "step-000005")
    assert latest.readlink() == Path("step-000005")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-000003", "step-000005"]
