"""The prompts of an experiment: one set of files, or several that are mixed, each with its own settings and reward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from megappo.config.data import DataConfig, PromptSetConfig
from megappo.config.data_names import source_name
from megappo.config.experiment import ExperimentConfig
from megappo.config.reward import RewardConfig
from megappo.data.feed import Order
from megappo.data.iterate import PromptOrder
from megappo.data.mixture import MixedOrder, SetSize
from megappo.data.prompts import load_prompts
from megappo.data.render import PromptRenderer
from megappo.data.text_prompts import TextPrompts
from megappo.data.tokenizer import Tokenizer, load_tokenizer
from megappo.errors import ConfigError
from megappo.experience.sample import Prompt

T = TypeVar("T")

OWN = ("prompt_key", "answer_key", "prompt_template", "system_prompt", "apply_chat_template")
"""Settings of `data` that a set may have for itself."""


def set_data(data: DataConfig, one: PromptSetConfig) -> DataConfig:
    """Section `data` as the set sees it."""
    own = {name: getattr(one, name) for name in OWN if getattr(one, name) is not None}
    return data.model_copy(update={**own, "train_files": one.files, "val_files": one.val_files, "sets": ()})


def training_prompts(config: ExperimentConfig, tokenizer: Tokenizer) -> tuple[list[Sequence[Prompt]], Order]:
    """The prompts of each set, and the order of their rows, which are numbered one set after another."""
    data = config.data
    if not data.sets:
        prompts = _loaded(config, data, tokenizer, data.train_files, None)
        return [prompts], PromptOrder(len(prompts), data.train_batch_size, data.seed, data.shuffle)
    loaded = [_loaded(config, set_data(data, one), tokenizer, one.files, one.name) for one in data.sets]
    sizes = [SetSize(one.name, len(prompts), one.weight) for one, prompts in zip(data.sets, loaded, strict=True)]
    return loaded, MixedOrder(sizes, data.train_batch_size, data.seed, data.shuffle)


def load_evaluation_sets(config: ExperimentConfig, tokenizer: Tokenizer) -> dict[str, list[Prompt]]:
    """The held-out prompts of each file, by the file's name, and of each prompt set, by the set's.

    ConfigError where two have one name.
    """
    data = config.data
    sets = held_out(config, lambda file: load_prompts(data, tokenizer, [file], data.max_val_samples))
    for number, one in enumerate(data.sets):
        if not one.val_files:
            continue
        if one.name in sets:
            raise ConfigError(
                f"data.sets.{number}.name: {one.name!r} is the name of a file in data.val_files too, and both would be "
                f"eval/{one.name}/…; give the set another name"
            )
        prompts = load_prompts(set_data(data, one), tokenizer, one.val_files, data.max_val_samples)
        sets[one.name] = [dataclasses.replace(prompt, source=one.name) for prompt in prompts]
    return sets


def held_out(config: ExperimentConfig, load: Callable[[str], list[T]]) -> dict[str, list[T]]:
    """What `load` reads from each held-out file, by the file's name. ConfigError where two files have one name."""
    sets: dict[str, list[T]] = {}
    for file in config.data.val_files:
        name = source_name(file)
        if name in sets:
            raise ConfigError(
                f"data.val_files: {file} would be the second data set named {name!r} in the metrics eval/{name}/…; "
                "give one of the two another file name"
            )
        sets[name] = load(file)
    return sets


def set_rewards(config: ExperimentConfig) -> Mapping[str, RewardConfig]:
    """The reward of each prompt set: those parts of the `reward` section that it names."""
    assert config.reward is not None, "checked by require_sound"
    parts = config.reward.parts
    return {
        one.name: config.reward.model_copy(
            update={"parts": tuple(part for part in parts if not one.reward or part.name in one.reward)}
        )
        for one in config.data.sets
    }


def _loaded(
    config: ExperimentConfig, data: DataConfig, tokenizer: Tokenizer, files: Sequence[str], name: str | None
) -> Sequence[Prompt]:
    """Prompts of one set, whose source is the set's name where it has one."""
    assert config.reward is not None, "checked by require_sound"
    # What is only measured on held-out prompts has no say in what training prompts need.
    needs_answer = config.reward.training_parts == config.reward.parts
    prompts = load_prompts(data, tokenizer, files, data.max_samples, needs_answer=needs_answer)
    if name is not None:
        prompts = [dataclasses.replace(prompt, source=name) for prompt in prompts]
    if not data.prefetch:
        return prompts
    # A tokenizer of its own: this one is asked by the thread that works ahead.
    own = PromptRenderer(data, load_tokenizer(config.model.tokenizer_folder))
    return TextPrompts(prompts, own, data.max_prompt_length)
