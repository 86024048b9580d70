"""The GSM8K experiment for GPUs, with a tiny model in SmolLM2's place: it runs, and the score is that of its parts."""

import json
from pathlib import Path

import pytest

from tests.support.ranks import ROOT
from tests.support.runs import metrics, succeed
from tests.support.tiny_models import tiny_model, tiny_tokenizer

QUESTIONS = ["2 + 3?", "4 and 4?", "7 less 6?", "One half of 18?"]


@pytest.mark.slow
def test_it_runs_with_a_tiny_model(tmp_path: Path) -> None:
    tiny_tokenizer(tiny_model(tmp_path / "model", "llama", tied=True))
    rows = [{"question": text, "answer": f"#### {place}"} for place, text in enumerate(QUESTIONS)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 2))
    (tmp_path / "test.jsonl").write_text(json.dumps(rows[0]) + "\n")
    succeed(
        "train", ROOT / "yaml" / "gsm8k_smollm2_gpu.yaml", f"model.path={tmp_path / 'model'}", "layout.pp=2",
        f"data.train_files=[{tmp_path / 'train.jsonl'}]", f"data.val_files=[{tmp_path / 'test.jsonl'}]",
        "data.train_batch_size=4", "actor.ppo_mini_batch_size=2", "actor.ppo_micro_batch_size_per_gpu=8",
        "data.max_response_length=16", f"trainer.run_dir={tmp_path / 'run'}", "trainer.total_steps=2",
    )  # fmt: skip
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert "eval/test/exact_match" in lines[0] and "eval/test/exact_match" in lines[2]
    for line in lines[1:]:
        parts = 2 * line["reward/parts/correct"] + line["reward/parts/form"]
        assert line["reward/score"] == pytest.approx(parts) and 0 <= line["reward/parts/form"] <= 1
        assert "critic/vf_loss" not in line and line["response_length/max"] <= 16
