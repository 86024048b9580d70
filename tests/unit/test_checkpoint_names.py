"""Checkpoints at every moment at which a save can be killed: one complete copy at least, and nothing left for good."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megappo.config import checkpoint_names
from megappo.config.checkpoint_folder import complete_checkpoints, read_state, readable_checkpoint
from megappo.config.checkpoint_names import finish_interrupted, readable, remove_left_over
from megappo.trainer import checkpoint
from megappo.trainer.checkpoint import CheckpointStore, LoopState
from tests.support.experiments import write_experiment


class Killed(Exception):
    """Stands for the end of the process."""


def one_rank_store(folder: Path, monkeypatch: pytest.MonkeyPatch, keep: int | None = None) -> CheckpointStore:
    """A store whose only rank writes one small file for a role."""
    write_experiment(folder)
    monkeypatch.setattr(checkpoint, "save_role", lambda path, role: (path / "weights").write_text(role.weights))
    monkeypatch.setattr(checkpoint.dist, "barrier", lambda: None)
    mesh = SimpleNamespace(is_writer=True, rank=0, world_size=1, world_group=SimpleNamespace(size=lambda: 1))
    spec = SimpleNamespace(folder=folder / "model")
    return CheckpointStore(folder / "checkpoints", mesh, spec, spec.folder, keep=keep)  # type: ignore[arg-type]


def save(store: CheckpointStore, step: int, weights: str = "first") -> None:
    model = SimpleNamespace(config=SimpleNamespace(params_dtype=torch.float32))
    role = SimpleNamespace(model=model, frozen=None, weights=weights)
    state = LoopState(step=step, data={}, kl_controller=None, seed=0)
    store.save({"actor": role}, state)  # type: ignore[dict-item]


def names(store_folder: Path) -> list[str]:
    return sorted(path.name for path in (store_folder / "checkpoints").iterdir())


def weights_of(folder: Path, step: int) -> str:
    return (folder / "checkpoints" / f"step-{step:06d}" / "actor" / "weights").read_text()


def killed_at(call: int, patch: pytest.MonkeyPatch) -> None:
    """The process ends in the place of its `call`-th change of a folder's name or removal, from 0, half of which a
    removal has done."""
    calls = 0
    replace, rmtree = os.replace, shutil.rmtree

    def counted() -> bool:
        nonlocal calls
        calls += 1
        return calls > call

    def replace_or_die(source: Path, target: Path) -> None:
        if counted():
            raise Killed
        replace(source, target)

    def remove_or_die(path: Path, ignore_errors: bool = False) -> None:
        if not path.exists():
            return
        if counted():
            rmtree(path / "actor")
            raise Killed
        rmtree(path, ignore_errors)

    patch.setattr(os, "replace", replace_or_die)
    patch.setattr(shutil, "rmtree", remove_or_die)


@pytest.mark.parametrize("call", range(4))
def test_a_step_saved_again_is_there_whenever_the_process_ends(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old folder steps aside, the new one gets the name, the old one is removed, `latest` is turned."""
    store = one_rank_store(tmp_path, monkeypatch)
    save(store, 5)
    with monkeypatch.context() as patch:
        killed_at(call, patch)
        with pytest.raises(Killed):
            save(store, 5, "again")
    # Who only reads finds a complete one meanwhile, and changes no name.
    left, saved = names(tmp_path), tmp_path / "checkpoints"
    found = [readable(saved / "step-000005"), readable(saved / "latest"), readable_checkpoint(saved)]
    read = [(path / "actor" / "weights").read_text() for path in found if path is not None]
    assert read == 3 * ["first" if call == 0 else "again"]
    assert names(tmp_path) == left
    finish_interrupted(tmp_path / "checkpoints")
    assert [path.name for path in complete_checkpoints(tmp_path / "checkpoints")] == ["step-000005"]
    assert weights_of(tmp_path, 5) == ("first" if call == 0 else "again")
    assert (tmp_path / "checkpoints" / "latest").resolve().name == "step-000005"
    assert read_state(tmp_path / "checkpoints" / "latest")["step"] == 5
    save(store, 6)
    assert names(tmp_path) == ["latest", "step-000005", "step-000006"]


@pytest.mark.parametrize("call", [2, 3])
def test_a_removal_that_is_killed_is_ended_by_a_later_save(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before the checkpoint loses its name, and within the removal; a folder that is no longer complete would
    count for no `trainer.max_checkpoints`."""
    store = one_rank_store(tmp_path, monkeypatch, keep=1)
    save(store, 1)
    with monkeypatch.context() as patch:
        killed_at(call, patch)
        with pytest.raises(Killed):
            save(store, 2)
    complete = [path.name for path in complete_checkpoints(tmp_path / "checkpoints")]
    assert complete == (["step-000001", "step-000002"] if call == 2 else ["step-000002"])
    save(store, 3)
    assert names(tmp_path) == ["latest", "step-000003"]


def test_half_written_checkpoints_of_any_step_are_removed_before_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill comes while files of step 137 are written, or its manifest; folders of other names are somebody else's."""
    store = one_rank_store(tmp_path, monkeypatch)
    folder = tmp_path / "checkpoints"
    for name in ("step-000137.partial", "step-000138.partial", "step-best.partial", "mine.old"):
        (folder / name / "actor").mkdir(parents=True)
    (folder / "step-000138.partial" / "manifest.json").write_text('{"actor/weights": [5, ')
    save(store, 2)
    assert names(tmp_path) == ["latest", "mine.old", "step-000002", "step-best.partial"]


def test_going_back_goes_back_to_the_best_of_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Best were step 2, then step 4; the run goes back to step 3, and `trainer.max_checkpoints` must leave step 2."""
    store, best = one_rank_store(tmp_path, monkeypatch), tmp_path / "checkpoints" / "best"
    for step in (2, 3, 4):
        save(store, step)
    store.mark_best(4)
    third = tmp_path / "checkpoints" / "step-000003"
    store.restore_best(third, 2)
    assert best.readlink() == Path("step-000002")
    save(one_rank_store(tmp_path, monkeypatch, keep=1), 5)
    assert names(tmp_path) == ["best", "latest", "step-000002", "step-000005"]


@pytest.mark.parametrize(("loaded_from", "step"), [("checkpoints", None), ("checkpoints", 1), ("elsewhere", 2)])
def test_no_link_leads_to_what_was_never_the_best(
    loaded_from: str, step: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No evaluation had come then; its checkpoint is gone; step 2 of another run is not this folder's step 2."""
    store = one_rank_store(tmp_path, monkeypatch)
    for number in (2, 3):
        save(store, number)
    store.mark_best(3)
    for _ in range(2):  # the second time without a link
        store.restore_best(tmp_path / loaded_from / "step-000002", step)
        assert names(tmp_path) == ["latest", "step-000002", "step-000003"]


def test_the_only_copy_of_a_step_gets_its_name_back(tmp_path: Path) -> None:
    """As earlier versions left it, which removed the old checkpoint before the new one had its name: all of it, or
    all but some files. A copy that lost a file is none, and one beside a complete checkpoint is not needed."""
    for step, has_half in ((1, False), (2, True)):
        make_copy(tmp_path / f"step-{step:06d}.partial")
        if has_half:
            (tmp_path / f"step-{step:06d}" / "rng").mkdir(parents=True)
    (make_copy(tmp_path / "step-000003.partial") / "weights").write_text("cut")
    make_copy(tmp_path / "step-000004")
    make_copy(tmp_path / "step-000004.partial")
    finish_interrupted(tmp_path)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-000001", "step-000002", "step-000004"]
    assert (tmp_path / "step-000002" / "weights").read_text() == "weights"
    remove_left_over(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002", "step-000004"]


def test_of_two_copies_without_a_name_the_whole_one_counts(tmp_path: Path) -> None:
    """The new one where both are, the old one where the machine lost the end of the new one's files."""
    for step in (1, 2):
        make_copy(tmp_path / f"step-{step:06d}.old", "before")
        make_copy(tmp_path / f"step-{step:06d}.partial", "anew")
    (tmp_path / "step-000002.partial" / "weights").write_text("")
    remove_left_over(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001", "step-000002"]
    assert [(tmp_path / f"step-00000{step}" / "weights").read_text() for step in (1, 2)] == ["anew", "before"]


def make_copy(folder: Path, weights: str = "weights") -> Path:
    """As complete as a checkpoint is known to be without its checksums."""
    folder.mkdir(parents=True)
    (folder / "weights").write_text(weights)
    (folder / "manifest.json").write_text(json.dumps({"weights": [len(weights), 0]}))
    return folder


def test_a_folder_that_is_no_checkpoint_is_replaced_where_it_is_empty(tmp_path: Path) -> None:
    """As `megappo convert` writes into one, beside folders that are not its own."""
    make_copy(tmp_path / "model.partial")
    (tmp_path / "model").mkdir()
    make_copy(tmp_path / "model.old", "mine")
    checkpoint_names.put_in_place(tmp_path / "model.partial", tmp_path / "model")
    assert (tmp_path / "model" / "weights").read_text() == "weights"
    assert (tmp_path / "model.old" / "weights").read_text() == "mine"
