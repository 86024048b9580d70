"""What a run reads before it builds a model, read by the run's own loaders and told in words: `validate --data`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megappo.config.experiment import ExperimentConfig
from megappo.data.iterate import PromptOrder
from megappo.data.preferences import load_preferences
from megappo.data.prompts import load_supervised
from megappo.data.tokenizer import Tokenizer, run_tokenizer
from megappo.models.architecture import ModelSpec, read_model
from megappo.trainer.build import refuse_foreign_tokens
from megappo.trainer.build_experience import pair_samples
from megappo.trainer.build_offline import held_out_pairs, pairs_to_score, tokens_of
from megappo.trainer.prompt_sets import load_evaluation_sets, training_prompts


def read_data(config: ExperimentConfig) -> str:
    """Reads all files of the experiment; raises DataError or ConfigError as the run would."""
    tokenizer, spec = run_tokenizer(config.model), read_model(config.model.path)
    read = _read_prompts if config.trainer.kind == "ppo" else _read_rows
    return f"data    {read(config, tokenizer, spec)}"


def _read_prompts(config: ExperimentConfig, tokenizer: Tokenizer, spec: ModelSpec) -> str:
    """Of PPO: one set of prompts or several, held-out ones, and pairs beside them."""
    loaded, order = training_prompts(config, tokenizer)
    num_val = _size(load_evaluation_sets(config, tokenizer))
    refuse_foreign_tokens((prompt.token_ids for prompts in loaded for prompt in prompts), config, spec)
    offline = pair_samples(config, tokenizer)
    refuse_foreign_tokens(((*one.prompt.token_ids, *one.response_ids) for one in offline), config, spec)
    sizes, steps = str(len(loaded[0])), f"{order.steps_per_epoch} steps an epoch"
    if config.data.sets:
        sizes = ", ".join(
            f"{len(prompts)} of {one.name}" for one, prompts in zip(config.data.sets, loaded, strict=True)
        )
        steps = f"{order.steps_per_epoch} steps draw as many"
    pairs = f", {len(offline) // 2} pairs beside them" if offline else ""
    return f"{sizes} for training ({steps}), {num_val} held out{pairs}"


def _read_rows(config: ExperimentConfig, tokenizer: Tokenizer, spec: ModelSpec) -> str:
    """Of what learns from a fixed data set."""
    data, kind = config.data, config.trainer.kind
    rows: Sequence[object]
    held_out: Mapping[str, Sequence[Any]]
    if kind == "sft":
        rows = examples = load_supervised(data, tokenizer, data.train_files, data.max_samples)
        refuse_foreign_tokens((example.token_ids for example in examples), config, spec)
        held_out = load_evaluation_sets(config, tokenizer)
    elif kind == "dpo":
        rows = pairs = load_preferences(data, tokenizer, data.train_files, data.max_samples)
        refuse_foreign_tokens(tokens_of(pairs), config, spec)
        held_out = (
            held_out_pairs(config, tokenizer) if config.reward is None else load_evaluation_sets(config, tokenizer)
        )
    else:
        scored, held_out = pairs_to_score(config, tokenizer, spec)
        rows = scored
        refuse_foreign_tokens((ids for pair in scored for ids in (pair.chosen, pair.rejected)), config, spec)
    steps = PromptOrder(len(rows), data.train_batch_size, data.seed, data.shuffle).steps_per_epoch
    return f"{len(rows)} for training ({steps} steps an epoch), {_size(held_out)} held out"


def _size(sets: Mapping[str, Sequence[Any]]) -> int:
    return sum(map(len, sets.values()))
