"""The wiring of what a PPO step learns from: prompts and their order, rewards, dynamic sampling, replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import overload

from megappo.config.experiment import ExperimentConfig
from megappo.data.feed import PromptFeed
from megappo.data.preferences import load_preferences
from megappo.data.tokenizer import Tokenizer
from megappo.experience.replay import ReplayBuffer
from megappo.experience.sample import Prompt, RolloutSample
from megappo.parallel.mesh import Mesh
from megappo.trainer.advantages import AdvantagePhase
from megappo.trainer.collect import Collector, GroupFilter
from megappo.trainer.pair_replay import offline_samples
from megappo.trainer.prompt_sets import set_rewards, training_prompts
from megappo.trainer.replay import NoReplay, Replay
from megappo.trainer.reward_models import build_reward_worker
from megappo.workers.critic import CriticWorker, NoCritic
from megappo.workers.reward import RewardWorker
from megappo.workers.reward_sets import SetRewards


class PromptChain(Sequence[Prompt]):
    """The prompts of all sets, one set after another."""

    def __init__(self, sets: Sequence[Sequence[Prompt]]) -> None:
        self._sets = sets

    def __len__(self) -> int:
        return sum(map(len, self._sets))

    def __iter__(self) -> Iterator[Prompt]:
        return chain.from_iterable(self._sets)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        for prompts in self._sets:
            if index < len(prompts):
                return prompts[index]
            index -= len(prompts)
        raise IndexError(index)


def prompt_feed(config: ExperimentConfig, tokenizer: Tokenizer) -> tuple[Sequence[Prompt], PromptFeed]:
    """All training prompts, and their feed, step by step."""
    sets, order = training_prompts(config, tokenizer)
    prompts = sets[0] if len(sets) == 1 else PromptChain(sets)
    return prompts, PromptFeed(prompts, order, ahead=config.data.prefetch)


def reward_worker(config: ExperimentConfig, mesh: Mesh) -> RewardWorker | SetRewards:
    """One for all prompts, or one for each prompt set."""
    assert config.reward is not None, "checked by require_sound"
    if not config.data.sets:
        return build_reward_worker(config, config.reward, mesh)
    return SetRewards({name: build_reward_worker(config, reward, mesh) for name, reward in set_rewards(config).items()})


def with_dynamic_sampling(config: ExperimentConfig, collector: Collector) -> Collector | GroupFilter:
    groups = config.algorithm.filter_groups
    return GroupFilter(collector, groups) if groups.enable else collector


def pair_samples(config: ExperimentConfig, tokenizer: Tokenizer) -> list[RolloutSample]:
    """The responses of `replay.pairs`, none where there are no such files."""
    files = config.replay.pairs
    return offline_samples(load_preferences(config.data, tokenizer, files), tokenizer.eos_ids) if files else []


def replay(
    config: ExperimentConfig, mesh: Mesh, critic: CriticWorker | NoCritic, advantages: AdvantagePhase
) -> Replay | NoReplay:
    """The replay buffer of this rank, in memory or on disk; its stand-in where `replay.size` is 0."""
    settings = config.replay
    if not settings.size:
        return NoReplay()
    path = None
    if settings.storage == "disk":
        path = Path(config.trainer.run_dir) / "replay" / f"rank-{mesh.rank:05d}.sqlite"
    buffer = ReplayBuffer(settings.size, settings.filtration, settings.power, config.trainer.seed, path)
    return Replay(
        buffer, settings, mesh, critic, advantages, num_prompts=config.data.train_batch_size,
        num_samples=config.rollout.n,
    )  # fmt: skip
