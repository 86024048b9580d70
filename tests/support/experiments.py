"""Small experiment files for tests of configuration and command line: a model folder of one config.json, no weights."""

import json
import os
from pathlib import Path

from megappo.config.experiment import ExperimentConfig
from megappo.config.load import load_experiment

MODEL = {
    "model_type": "llama",
    "num_attention_heads": 12,
    "num_key_value_heads": 3,
    "num_hidden_layers": 6,
    "max_position_embeddings": 64,
    "hidden_size": 48,
    "intermediate_size": 96,
    "vocab_size": 64,
    "rms_norm_eps": 1e-6,
}

EXPERIMENT = """\
model:
  path: {folder}/model
data:
  train_files: [{folder}/train.jsonl]
  train_batch_size: 12
  max_prompt_length: 16
  max_response_length: 16
actor:
  ppo_mini_batch_size: 6
reward:
  parts:
    - {{name: correct, kind: exact_match}}
trainer:
  run_dir: {folder}/runs/test
  total_steps: 3
"""


def write_experiment(folder: Path, more: str = "", **model: object) -> Path:
    """An experiment that is valid: 12 prompts a step, minibatches of 6, a model of 12 heads, 3 KV heads, 6 layers."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(MODEL | model))
    (folder / "train.jsonl").write_text('{"prompt": "3+4=", "answer": "7"}\n')
    file = folder / "exp.yaml"
    file.write_text(EXPERIMENT.format(folder=folder) + more)
    return file


def small_experiment(folder: Path, *overrides: str) -> ExperimentConfig:
    return load_experiment(write_experiment(folder), overrides)


def make_checkpoint(folder: Path, step: int, **model: object) -> Path:
    """A complete checkpoint as far as it can be read without torch, written `step` seconds after the first one."""
    path = folder / f"step-{step:06d}"
    path.mkdir(parents=True)
    signature = {
        "model_type": "llama", "num_layers": 6, "hidden_size": 48, "num_heads": 12, "num_kv_heads": 3,
        "vocab_size": 64,
    }  # fmt: skip
    (path / "trainer.json").write_text(json.dumps({"step": step, "model": signature | model}))
    (path / "manifest.json").write_text("{}")
    os.utime(path / "manifest.json", (1000 + step, 1000 + step))
    return path
