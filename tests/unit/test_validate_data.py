"""`megappo validate --data` reads what a run of each kind would read, and counts it."""

import json
import shlex
from pathlib import Path

import pytest

from megappo.cli.main import main
from tests.support.runs import write_run_experiment


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """14 prompts, 4 held out; 9 pairs, of which one has two equal responses, 3 held out; 6 examples of one response."""
    file = write_run_experiment(tmp_path_factory.mktemp("validated"))
    pairs = [{"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(8)]
    pairs.append({"prompt": "8+1=", "chosen": "9", "rejected": "9"})
    files = {"pairs": pairs, "held_out_pairs": pairs[:3], "examples": [row | {"response": "x"} for row in pairs[:6]]}
    for name, rows in files.items():
        (file.parent / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


PAIRS = "data.train_files=[{folder}/pairs.jsonl] data.val_files=[{folder}/held_out_pairs.jsonl] reward=null"
HELD_OUT_PROMPTS = "data.val_files=[{folder}/held_out.jsonl] reward=null"
"""Held-out prompts, without a chosen response, in the place of pairs."""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "14 for training (3 steps an epoch), 4 held out"),
        ("data.prefetch=true data.val_files=[]", "14 for training (3 steps an epoch), 0 held out"),
        (
            "replay.pairs=[{folder}/pairs.jsonl] replay.fraction=0.25",
            "14 for training (3 steps an epoch), 4 held out, 8 pairs beside them",
        ),
        (
            "data.train_files=[] 'data.sets=[{{name: sums, files: [{folder}/train.jsonl]}}]' data.val_files=[]",
            "14 of sums for training (3 steps draw as many), 0 held out",
        ),
        (
            "trainer.kind=sft data.train_files=[{folder}/examples.jsonl]",
            "6 for training (1 steps an epoch), 4 held out",
        ),
        (f"trainer.kind=dpo {PAIRS}", "8 for training (2 steps an epoch), 3 held out"),
        (
            "trainer.kind=dpo data.train_files=[{folder}/pairs.jsonl]",
            "8 for training (2 steps an epoch), 4 held out",
        ),
        (f"trainer.kind=reward_model {PAIRS}", "8 for training (2 steps an epoch), 3 held out"),
    ],
)
def test_counts(experiment: Path, capsys: pytest.CaptureFixture[str], words: str, expected: str) -> None:
    code, out, err = validated(experiment, capsys, words)
    assert code == 0, err
    assert f"data    {expected}\n" in out


@pytest.mark.parametrize("kind", ["dpo", "reward_model"])
def test_held_out_files_of_pairs_are_pairs(experiment: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    code, _, err = validated(
        experiment, capsys, f"trainer.kind={kind} data.train_files=[{{folder}}/pairs.jsonl] {HELD_OUT_PROMPTS}"
    )
    assert code == 2 and f"{experiment.parent}/held_out.jsonl:1: no column 'chosen'" in err


def test_a_reward_model_reads_conversations_that_fit_its_positions(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`user: 0+1=`, `assistant: 1` and two ends of lines have 24 characters; the prompt's own tokens are cut to 5."""
    folder = experiment.parent
    config = json.loads((folder / "model" / "config.json").read_text())
    (folder / "short").mkdir()
    (folder / "short" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 23}))
    words = f"trainer.kind=reward_model {PAIRS} model.path={{folder}}/short model.tokenizer_path={{folder}}/model "
    words += "data.max_prompt_length=5 data.max_response_length=4 data.overlong_prompts=left "
    words += "data.apply_chat_template=true"
    code, _, err = validated(experiment, capsys, words)
    assert code == 2
    assert "pair 0 of pairs has 24 tokens with its template, and the model was made for 23 positions" in err


def validated(experiment: Path, capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error; `{folder}` in `words` is the experiment's."""
    typed = shlex.split(words.format(folder=experiment.parent))
    code = int(main(["validate", str(experiment), "--data", *typed]))
    out, err = capsys.readouterr()
    return code, out, err
