"""What a command that only reads finds of folders that a kill has left without their names: checkpoints and exports."""

import json
import os
from pathlib import Path

import pytest

from megappo.cli import main
from megappo.config.checkpoint_folder import checkpoint_to_resume, readable_checkpoint
from megappo.config.checkpoint_names import readable
from megappo.config.checks import check_experiment
from megappo.data.tokenizer import load_tokenizer
from megappo.models.architecture import read_model
from megappo.models.hf_folder import SafetensorsReader, copy_companions
from megappo.trainer.frozen_weights import FrozenWeights
from megappo.trainer.policy_source import PolicySource
from tests.support.experiments import make_checkpoint, small_experiment, write_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def without_name(path: Path, suffix: str = ".partial") -> Path:
    return path.rename(path.with_name(path.name + suffix))


@pytest.mark.parametrize("suffix", [".partial", ".old"])
def test_a_checkpoint_without_its_name_is_found_under_it_and_under_latest(tmp_path: Path, suffix: str) -> None:
    third, fifth = make_checkpoint(tmp_path, 3), make_checkpoint(tmp_path, 5)
    (tmp_path / "latest").symlink_to("step-000003")
    nameless = without_name(third, suffix)
    before = listing(tmp_path)
    assert readable(third) == readable(tmp_path / "latest") == readable_checkpoint(tmp_path) == nameless
    assert readable(fifth) == fifth
    assert listing(tmp_path) == before


def test_latest_that_leads_nowhere_is_the_newest_with_a_name_or_without(tmp_path: Path) -> None:
    third, fifth = make_checkpoint(tmp_path, 3), make_checkpoint(tmp_path, 5)
    assert readable(tmp_path / "latest") == fifth, "killed before the first link"
    nameless = without_name(fifth)
    (tmp_path / "latest").symlink_to("step-000009")
    assert readable(tmp_path / "latest") == readable_checkpoint(tmp_path) == nameless
    (nameless / "manifest.json").write_text('{"weights": [5, 0]}')  # and there is no such file
    assert readable(tmp_path / "latest") == readable_checkpoint(tmp_path) == third
    (third / "manifest.json").unlink()
    assert readable(tmp_path / "latest") == tmp_path / "latest" and readable_checkpoint(tmp_path) is None


def test_other_folders_are_what_they_are(tmp_path: Path) -> None:
    """A copy that somebody calls model.old is not taken for the model; a file that is cut is no manifest; a link into
    a folder of runs leads to what that holds."""
    for name, content in (("model.old", "{}"), ("step-000002.partial", '{"weights": [')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(content)
    for name in ("model", "step-000002", "none/latest"):
        assert readable(tmp_path / name) == tmp_path / name
    (tmp_path / "mine").symlink_to(make_checkpoint(tmp_path / "runs", 4))
    assert readable(tmp_path / "mine") == tmp_path / "mine"
    assert readable(tmp_path / "mine").samefile(tmp_path / "runs" / "step-000004")
    nameless = without_name(tmp_path / "runs" / "step-000004")
    assert readable(tmp_path / "mine") == nameless
    (tmp_path / "loop").symlink_to("loop")
    assert readable(tmp_path / "loop") == tmp_path / "loop"


def test_commands_that_read_and_a_run_that_goes_on_elsewhere_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What they ask of the ranks names the folder as it was typed: the ranks look again."""
    file, asked = write_experiment(tmp_path), []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for command in ("convert", "evaluate", "generate"):
        monkeypatch.setattr(f"megappo.cli.{command}.run_on_ranks", lambda request, *_, **__: asked.append(request) or 0)
    path = make_checkpoint(tmp_path / "runs" / "test" / "checkpoints", 5)
    (path / "model").symlink_to(tmp_path / "model")
    (path.parent / "latest").symlink_to(path.name)
    without_name(path, ".old")
    val, latest = f"data.val_files=[{tmp_path}/train.jsonl]", str(path.parent / "latest")
    for words in (
        ["evaluate", str(file), val],
        ["evaluate", str(file), val, "--model", latest],
        ["generate", "--model", latest, "--prompt", "a", "--tp", "3"],
        ["convert", "--from", latest, "--to", f"{tmp_path}/new", "--tp", "3"],
    ):
        assert main.main(words) == 0, capsys.readouterr().err
    assert [getattr(request, "model", None) or getattr(request, "source", None) for request in asked] == [
        None, latest, latest, latest
    ]  # fmt: skip
    # The model's sizes were read where they are: 12 heads and 6 layers.
    assert main.main(["generate", "--model", latest, "--prompt", "a", "--tp", "5"]) == 2
    assert "--tp 5: does not divide the 12 attention heads" in capsys.readouterr().err
    elsewhere = small_experiment(tmp_path, f"trainer.resume={latest}", f"trainer.run_dir={tmp_path}/elsewhere")
    assert check_experiment(elsewhere, 1) == []
    assert checkpoint_to_resume(elsewhere) == path.with_name("step-000005.old")


def test_ranks_read_a_checkpoint_without_its_name(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, 5)
    (path / "trainer.json").write_text('{"step": 5, "dtype": "bfloat16"}')
    (tmp_path / "latest").symlink_to(path.name)
    nameless = without_name(path)
    source = PolicySource.of(tmp_path / "latest")
    assert (source.checkpoint, source.folder) == (nameless, nameless / "model")


def test_a_run_starts_from_an_export_without_its_name(tmp_path: Path) -> None:
    """`model.path: …/hf/latest` of another run: its sizes, tensors, tokenizer, and what is copied of it."""
    folder = tiny_model(tmp_path / "runs" / "hf" / "step-000005", "llama")
    tiny_tokenizer(folder)
    latest = folder.parent / "latest"
    latest.symlink_to(folder.name)
    config = json.loads((folder / "config.json").read_text())
    size, vocabulary = (folder / "model.safetensors").stat().st_size, len(load_tokenizer(folder)._backend)
    nameless = without_name(folder, ".old")
    before = listing(tmp_path)

    experiment = small_experiment(tmp_path, f"model.path={latest}", f"model.tokenizer_path={latest}")
    assert [problem for problem in check_experiment(experiment, 1) if problem.path.startswith("model")] == []
    spec = read_model(latest)
    assert spec.folder == latest, "the name stays, for it comes back"
    assert spec.shape.num_layers == config["num_hidden_layers"]
    assert PolicySource.of(latest).folder == nameless
    with SafetensorsReader(latest) as reader:
        assert reader.shape("model.embed_tokens.weight") == (config["vocab_size"], config["hidden_size"])
    frozen = FrozenWeights.of(latest)
    assert frozen.folder == folder and frozen.files["model.safetensors"][0] == size
    assert load_tokenizer(latest).vocab_size == vocabulary
    copied = tmp_path / "copied"
    copied.mkdir()
    copy_companions(latest, copied)
    assert json.loads((copied / "config.json").read_text()) == config and (copied / "tokenizer.json").is_file()
    assert [name for name in listing(tmp_path) if name.startswith("runs")] == [
        name for name in before if name.startswith("runs")
    ]


def test_the_newest_export_is_the_one_that_was_complete_last(tmp_path: Path) -> None:
    for second, step in enumerate((8, 4)):
        folder = tmp_path / f"step-{step:06d}"
        folder.mkdir()
        (folder / "adapter_config.json").write_text("{}")
        os.utime(folder / "adapter_config.json", (1000 + second, 1000 + second))
    assert readable(tmp_path / "latest") == tmp_path / "step-000004"


def test_a_checkpoint_is_no_model_to_start_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_experiment(tmp_path)
    path = make_checkpoint(tmp_path / "other" / "checkpoints", 5)
    assert main.main(["validate", str(file), f"model.path={path}"]) == 2
    expected = (
        f"the folder is a checkpoint, and no Hugging Face folder; megappo convert --from {path} --to FOLDER writes"
    )
    assert expected in capsys.readouterr().err
