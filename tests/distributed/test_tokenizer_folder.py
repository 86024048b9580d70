"""A run whose tokenizer is in a folder of its own (`model.tokenizer_path`): everything that it writes has that one."""

import json
from pathlib import Path

import pytest

from megappo.data.tokenizer import load_tokenizer
from tests.support.ranks import run_ranks
from tests.support.tiny_models import tiny_model, tiny_tokenizer
from tests.support.tokenizers import char_ids, save_tokenizer

EXPERIMENT = """\
model: {{path: {folder}/policy, tokenizer_path: {folder}/words, dtype: float32, layers: torch}}
data:
  train_files: [{folder}/train.jsonl]
  train_batch_size: 2
  max_prompt_length: 8
  max_response_length: 8
  response_key: answer
actor: {{ppo_micro_batch_size_per_gpu: 2}}
trainer: {{kind: sft, run_dir: {folder}/unused, total_steps: 1, export_hf: true}}
observe: {{tensorboard: false, console: false}}
"""
RUNS = {"whole": "", "adapters": "model.lora.rank=2", "merged": "model.lora.rank=2,model.lora.export_merged=true"}
WRITTEN = [f"{run}/run/{place}" for run in RUNS for place in ("hf/latest", "checkpoints/latest/model")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder has another tokenizer, whose chat template is a file that the run's tokenizer has not got."""
    folder = tmp_path_factory.mktemp("tokenizer-folder")
    tiny_tokenizer(tiny_model(folder / "policy", tied=True))
    assert (folder / "policy" / "chat_template.jinja").is_file()
    save_tokenizer(folder / "words")
    rows = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(4)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "experiment.yaml").write_text(EXPERIMENT.format(folder=folder))
    words = [f"{name}={overrides}" for name, overrides in RUNS.items()]
    run_ranks(
        "tests.distributed.programs.offline", "--config", folder / "experiment.yaml", "--folder", folder,
        "--runs", *words, nproc=1,
    )  # fmt: skip
    return folder


@pytest.mark.parametrize("place", WRITTEN)
def test_exports_and_checkpoints_have_the_tokenizer_of_the_run(folder: Path, place: str) -> None:
    tokenizer = load_tokenizer(folder / place)
    assert tokenizer.encode("12+7=") == char_ids("12+7=") == [4, 5, 13, 10, 15]
    assert not tokenizer.has_chat_template and tokenizer.vocab_size == 3 + 10 + 3 + 26 + 5


def test_a_model_keeps_its_own_configuration_and_adapters_have_none(folder: Path) -> None:
    config = json.loads((folder / "whole" / "run" / "hf" / "latest" / "config.json").read_text())
    assert config == json.loads((folder / "policy" / "config.json").read_text())
    adapters = {file.name for file in (folder / "adapters" / "run" / "hf" / "latest").iterdir()}
    assert adapters == {
        "adapter_config.json", "adapter_model.safetensors", "generation_config.json", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
