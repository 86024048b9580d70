"""Responses of several turns from vLLM: tokens of the policy have the log-probs of a plain forward."""

import json
from pathlib import Path

import pytest
import torch

from tests.distributed.test_experience import TURNS
from tests.support.ranks import run_ranks
from tests.support.runs import write_run_experiment
from tests.support.tiny_models import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.vllm


def test_vllm_takes_turns(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    experiment = write_run_experiment(tmp_path)
    tiny_model(tmp_path / "model", "llama", tied=True, hidden_size=128, head_dim=32)
    tiny_tokenizer(tmp_path / "model")
    overrides = [*TURNS, "rollout.engine=vllm", "rollout.seed_per_request=true", "layout.tp=2"]
    (tmp_path / "runs.json").write_text(json.dumps({"vllm": {"kind": "turns", "overrides": overrides}}))
    program = "tests.distributed.programs.experience"
    arguments = ("--config", experiment, "--folder", tmp_path, "--runs", tmp_path / "runs.json")
    ranks = run_ranks(program, *arguments, nproc=2, torchrun=True)["vllm"]
    assert ranks[0]["rows"] == ranks[1]["rows"]
    rows = ranks[0]["rows"]
    assert len(rows) == 16 and max(row["num_turns"] for row in rows) > 2
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    for row in rows:
        prompt, response, mask = row["prompt_ids"], row["response_ids"], row["mask"]
        assert len(response) <= 40
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]
        expected = torch.where(torch.tensor(mask), expected, 0.0).tolist()
        assert row["rollout"] == pytest.approx(expected, abs=1e-4)
        assert row["old"] == pytest.approx(expected, abs=1e-4)
    assert ranks[0]["update"]["actor/pg_loss"] == pytest.approx(-1.0, abs=1e-5)
