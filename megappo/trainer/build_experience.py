"""The wiring of what a PPO step learns from: prompts and their order, the turn to generate, rewards, replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import overload

from megappo.config.data_names import source_name
from megappo.config.experiment import ExperimentConfig
from megappo.data.feed import PromptFeed
from megappo.data.preferences import load_preferences
from megappo.data.tokenizer import Tokenizer
from megappo.experience.replay import ReplayBuffer
from megappo.experience.sample import Prompt, RolloutSample
from megappo.parallel.mesh import Mesh
from megappo.trainer.advantages import AdvantagePhase
from megappo.trainer.baseline import GreedyBaseline, NoBaseline
from megappo.trainer.collect import Collector, GroupFilter
from megappo.trainer.generation import check_limit
from megappo.trainer.pair_replay import PairReplay, offline_samples
from megappo.trainer.prompt_sets import set_rewards, training_prompts
from megappo.trainer.replay import NoReplay, Replay
from megappo.trainer.reward_models import build_reward_worker
from megappo.trainer.weight_switch import WeightSwitch
from megappo.workers.actor import ActorWorker
from megappo.workers.critic import CriticWorker, NoCritic
from megappo.workers.reference import NoReference, ReferenceWorker
from megappo.workers.reward import RewardWorker
from megappo.workers.reward_sets import SetRewards
from megappo.workers.rollout import RolloutWorker
from megappo.workers.shaping import RewardShaping


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
    """One for all prompts, or one for each prompt set; beside sets, files of `data.val_files` have all parts."""
    assert config.reward is not None, "checked by require_sound"
    if not config.data.sets:
        return build_reward_worker(config, config.reward, mesh)
    sections = set_rewards(config)
    workers = {name: build_reward_worker(config, section, mesh) for name, section in sections.items()}
    if not config.data.val_files:
        return SetRewards(workers)
    # A set that has all parts lends its worker: another one would hold the models a second time.
    full = next((workers[name] for name, section in sections.items() if section.parts == config.reward.parts), None)
    full = full or build_reward_worker(config, config.reward, mesh)
    return SetRewards(workers, {source_name(file): full for file in config.data.val_files})


def with_dynamic_sampling(config: ExperimentConfig, collector: Collector) -> Collector | GroupFilter:
    groups = config.algorithm.filter_groups
    return GroupFilter(collector, groups) if groups.enable else collector


def pair_samples(config: ExperimentConfig, tokenizer: Tokenizer) -> list[RolloutSample]:
    """The responses of `replay.pairs`, none where there are no such files."""
    files = config.replay.pairs
    return offline_samples(load_preferences(config.data, tokenizer, files), tokenizer.eos_ids) if files else []


def weight_switch(
    config: ExperimentConfig, mesh: Mesh, rollout: RolloutWorker, policy: ActorWorker, prompts: Sequence[Prompt]
) -> WeightSwitch:
    """The turn between training and generation, which probes with some of the `prompts`."""
    return WeightSwitch(
        rollout, policy, prompts, mesh, check_every=config.hybrid.check_every, limit=check_limit(config)
    )


def greedy_baseline(
    config: ExperimentConfig, rollout: RolloutWorker, reward: RewardWorker | SetRewards, mesh: Mesh
) -> GreedyBaseline | NoBaseline:
    """What the responses of a prompt are compared with, for the estimator that does so."""
    if config.algorithm.adv_estimator != "remax":
        return NoBaseline()
    return GreedyBaseline(rollout, reward, mesh, config.rollout.n)


def replay(
    config: ExperimentConfig,
    mesh: Mesh,
    pairs: Sequence[RolloutSample],
    reward: RewardWorker | SetRewards,
    shaping: RewardShaping,
    reference: ReferenceWorker | NoReference,
    critic: CriticWorker | NoCritic,
    advantages: AdvantagePhase,
) -> Replay | PairReplay | NoReplay:
    """What is trained on beside a step's own sequences: responses of `pairs`, or the buffer of this rank, in memory or
    on disk; nothing where there are no pairs and `replay.size` is 0."""
    settings = config.replay
    if pairs:
        return PairReplay(
            pairs, settings, mesh, reward, shaping, reference, critic, advantages,
            num_sequences=config.data.train_batch_size * config.rollout.n, seed=config.trainer.seed,
        )  # fmt: skip
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
