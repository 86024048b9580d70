"""What users type wrong: exit code 2, and a message with the place, the value and what would do. No traceback.

`pytest -s` prints the table: what was typed, the exit code, the message. All cases but two end in this process, before
a rank is started; what only the data can tell is seen by `validate --data` in the same words.
"""
# ruff: noqa: E501  a line of the table is one case

import json
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from megappo.cli import train
from megappo.cli.main import main
from megappo.errors import ExitCode
from tests.support.runs import REWARDS, megappo, status, write_run_experiment
from tests.support.tiny_models import tiny_model


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment beside what the cases need: other data, another model, a run that has checkpoints."""
    file = write_run_experiment(tmp_path_factory.mktemp("wrong"))
    folder = file.parent
    (folder / "empty.jsonl").write_text("")
    (folder / "torn.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+\n')
    (folder / "long.jsonl").write_text(
        '{"prompt": "short", "answer": ""}\n' + json.dumps({"prompt": 30 * "x", "answer": ""}) + "\n"
    )
    tiny_model(folder / "other", "qwen2", num_layers=4)
    write_checkpoint_files(folder / "run" / "checkpoints" / "step-000005", vocab_size=128)
    write_checkpoint_files(folder / "foreign", vocab_size=131)
    tiny_model(folder / "small", vocab_size=32)
    (folder / "half").mkdir()
    (folder / "half" / "held_out.jsonl").write_bytes((folder / "held_out.jsonl").read_bytes())
    for place in (folder, folder / "half"):
        (place / "pairs.jsonl").write_text(4 * '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n')
    return file


def write_checkpoint_files(folder: Path, vocab_size: int) -> None:
    """A complete checkpoint as far as it is read before a rank is started."""
    folder.mkdir(parents=True)
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_size": vocab_size}
    (folder / "trainer.json").write_text(json.dumps({"step": 5, "model": {"model_type": "llama", **sizes}}))
    (folder / "manifest.json").write_text("{}")


@dataclass(frozen=True)
class Case:
    """Words after the experiment file as a shell reads them, `{folder}` standing for its folder, and what the message must hold."""

    name: str
    words: str
    message: tuple[str, ...]
    command: str = "train"


# Run folders are `new` unless a case is about one that has checkpoints.
CASES = (
    Case("unknown key", "actor.optim.lrr=1", ("actor.optim.lrr", "did you mean actor.optim.lr?")),
    Case("wrong type", "data.train_batch_size=many", ("data.train_batch_size", '"many"', "(command line)", "number")),
    Case("out of bounds", "layout.tp=0", ("layout.tp: 0 (command line)", "has to be at least 1")),
    Case("missing data file", "data.train_files=[{folder}/trian.jsonl]", ("data.train_files.0", "trian.js", "there is no such file in {folder}", "give a JSONL or Parquet file")),
    Case("missing model", "model.path={folder}/none", ("model.path", "{folder}/none", "there is no such folder", "give a Hugging Face folder")),
    Case("empty data set", "data.train_files=[{folder}/empty.jsonl] --data", ("{folder}/empty.jsonl", "no rows"), "validate"),
    Case("torn line", "data.train_files=[{folder}/torn.jsonl] --data", ("{folder}/torn.jsonl:2: not JSON at column",), "validate"),
    Case("prompt too long", "data.train_files=[{folder}/long.jsonl] --data", ("{folder}/long.jsonl:2", "the prompt has 30 tokens, data.max_prompt_length is 24", "set data.max_prompt_length=30 or more"), "validate"),
    Case("more prompts than there are", "data.train_batch_size=16 actor.ppo_mini_batch_size=16 --data", ("14", "16", "set"), "validate"),
    Case("column that is not there", "data.prompt_key=question --data", ("train.jsonl:1", "question", "data.prompt_key"), "validate"),
    Case("pairs without a column", "replay.pairs=[{folder}/train.jsonl] replay.fraction=0.25 --data", ("{folder}/train.jsonl:1: no column 'chosen'", "data.chosen_key"), "validate"),
    Case("held-out files of one name", "data.val_files=[{folder}/held_out.jsonl,{folder}/half/held_out.jsonl] --data", ("data.val_files: {folder}/half/held_out.jsonl", "the second data set named 'held_out'"), "validate"),
    Case("held-out pairs of one name", "trainer.kind=reward_model reward=null data.train_files=[{folder}/pairs.jsonl] data.val_files=[{folder}/pairs.jsonl,{folder}/half/pairs.jsonl] --data", ("data.val_files: {folder}/half/pairs.jsonl", "the second data set named 'pairs'"), "validate"),
    Case("tokenizer of a larger vocabulary", "model.path={folder}/small model.tokenizer_path={folder}/model --data", ("{folder}/model: its tokenizer gives token", "the vocabulary of {folder}/small ends at 31"), "validate"),
    Case("heads", "layout.tp=3", ("layout.tp: 3 (command line)", "does not divide the 4 attention heads (2 KV heads)", "2 or 4")),
    Case("layers", "layout.pp=3", ("layout.pp: 3 (command line)", "does not divide the 2 layers", "2")),
    Case("world size", "layout.tp=2 layout.pp=2 --nproc 3", ("layout.tp: 2 (command line)", "tp 2 · pp 2 = 4 ranks", "does not divide 3 ranks", "start another number of ranks (nearest that can: 4)")),
    Case("dp of the layout", "layout.dp=2 --nproc 4", ("layout.dp: 2 (command line)", "4 are started", "set it to 4, or leave it out")),
    Case("minibatch", "actor.ppo_mini_batch_size=3", ("actor.ppo_mini_batch_size: 3 (command line)", "does not divide", "data.train_batch_size 4", "2 or 4")),
    Case("micro-batch", "actor.ppo_micro_batch_size_per_gpu=3", ("actor.ppo_micro_batch_size_per_gpu: 3 (command line)", "4")),
    Case("module of a reward", "'reward.parts=[{{name: a, kind: function, function: my_rewards:f}}]' --data", ("reward.parts[0].function", "'my_rewards:f'", "no module 'my_rewards'"), "validate"),
    Case("name of a reward", "'reward.parts=[{{name: a, kind: function, function: " + REWARDS + ":spraed}}]' --data", ("reward.parts[0].function", ":spraed'", "did you mean 'spread'?"), "validate"),
    Case("form of a reward", "'reward.parts=[{{name: a, kind: function, function: my_rewards.f}}]'", ("reward.parts.0.function", "my_rewards.f", "module:function")),
    Case("checkpoint of another model", "trainer.resume={folder}/foreign", ("{folder}/foreign: a checkpoint of another model", "vocab_size 131 there, 128 in {folder}/model", "set model.path")),
    Case("half a checkpoint", "trainer.resume={folder}/half", ("{folder}/half: not a complete checkpoint (no manifest.json)", "name a folder like")),
    Case("run that has checkpoints", "trainer.run_dir={folder}/run", ("trainer.run_dir: {folder}/run holds the checkpoint step-000005", "--resume", "or choose another folder")),
    Case("resumed with another model", "trainer.run_dir={folder}/run --resume model.path={folder}/other model.tokenizer_path={folder}/model", ("step-000005: a checkpoint of another model (model_type llama there, qwen2 in {folder}/other", "num_layers 2 there, 4 in")),
)  # fmt: skip


def words_of(case: Case, experiment: Path) -> list[str]:
    folder = experiment.parent
    own = [] if "run_dir" in case.words else [f"trainer.run_dir={folder}/new"]
    return [case.command, str(experiment), *own, *shlex.split(case.words.format(folder=folder))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused_before_a_rank_is_started(
    case: Case, experiment: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(train, "run_on_ranks", lambda *arguments, **settings: pytest.fail("ranks were started"))
    words = words_of(case, experiment)
    code = main(words)
    said = capsys.readouterr().err
    message = next(line for line in said.splitlines() if line.startswith("error"))
    with capsys.disabled():
        shown = " ".join(word for word in words[2:] if not word.endswith("/new"))
        print(f"\n{case.command} {shown}\n  exit {int(code)}  {message}".replace(str(experiment.parent), "…"), end="")
    assert code == ExitCode.BAD_INPUT
    for part in case.message:
        assert part.format(folder=experiment.parent) in said, said
    assert "Traceback" not in said


def test_missing_experiment_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "nowhere/exp.yaml"]) == ExitCode.BAD_INPUT
    assert "error: nowhere/exp.yaml does not exist; give the path of an experiment file" in capsys.readouterr().err


def test_ranks_say_once_what_only_the_data_tells(experiment: Path, tmp_path: Path) -> None:
    """The same words as in `validate --data`, from one of two ranks, before a model is built."""
    folder = experiment.parent
    words = [f"trainer.run_dir={tmp_path}", f"data.train_files=[{folder}/long.jsonl]", "layout.tp=2"]
    refused = megappo("train", experiment, *words)
    assert refused.code == ExitCode.BAD_INPUT
    errors = [line for line in refused.err.splitlines() if line.startswith("error")]
    assert len(errors) == 1 and f"{folder}/long.jsonl:2: the prompt has 30 tokens" in errors[0]
    assert "Traceback" not in refused.err + (tmp_path / "logs" / "rank-00001.out").read_text()
    assert (status(tmp_path)["state"], status(tmp_path)["exit_code"]) == ("failed", 2)
