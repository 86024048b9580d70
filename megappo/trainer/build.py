"""The wiring of PPO: from a configuration and a mesh to a trainer whose parts know nothing of each other.

What learns from a fixed data set is wired in `build_offline.py`; which of all is meant, in `kinds.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from megappo.algorithms.kl import KLController
from megappo.config.experiment import ExperimentConfig
from megappo.data.iterate import PromptOrder
from megappo.data.prompts import load_prompts
from megappo.data.sources import source_name
from megappo.data.tokenizer import Tokenizer, load_tokenizer
from megappo.errors import ConfigError, DataError
from megappo.experience.sample import Prompt
from megappo.models.build import ModelSpec
from megappo.parallel.mesh import Mesh
from megappo.planner.batch import plan_batches
from megappo.trainer.advantages import AdvantagePhase
from megappo.trainer.checkpoint import SavedRole
from megappo.trainer.evaluate import Evaluator, evaluation_sampling
from megappo.trainer.generation import check_limit, rollout_worker, training_sampling
from megappo.trainer.loop import Evaluates, Loop, LoopParts
from megappo.trainer.ppo import PPOTrainer
from megappo.trainer.roles import RoleBuilder, TrainedRole
from megappo.trainer.weight_switch import WeightSwitch
from megappo.workers.actor import ActorWorker
from megappo.workers.critic import CriticWorker
from megappo.workers.policy import LogProbs
from megappo.workers.reference import NoReference, ReferenceWorker
from megappo.workers.reward import RewardWorker
from megappo.workers.rollout import RolloutWorker

T = TypeVar("T")


def build_ppo(config: ExperimentConfig, mesh: Mesh) -> PPOTrainer:
    """Data and rewards first, models after: what is cheap to refuse is refused before anything is expensive."""
    assert config.reward is not None, "checked by require_sound"
    plan = plan_batches(config, mesh.dp)
    tokenizer = load_tokenizer(config.model.tokenizer_folder)
    prompts = load_prompts(config.data, tokenizer, config.data.train_files, config.data.max_samples)
    data = TrainingData.of(config, tokenizer, len(prompts))
    reward = RewardWorker(config.reward, mesh)

    roles = RoleBuilder(config, mesh)
    spec = roles.spec()
    refuse_foreign_tokens((prompt.token_ids for prompt in prompts), config, spec)
    actor = roles.actor(data.total_steps * plan.actor.optimizer_steps)
    critic = roles.critic(data.total_steps * plan.critic.optimizer_steps)
    rollout = rollout_worker(config, mesh, spec, tokenizer, actor.engine.model)
    scale_length = config.actor.loss_scale_length or config.data.max_response_length
    actor_worker = ActorWorker(actor.engine, config.actor, log_probs(config, mesh, spec), scale_length=scale_length)
    controller = KLController(
        **config.algorithm.kl_ctrl.model_dump(exclude={"type"}), kind=config.algorithm.kl_ctrl.type
    )
    return PPOTrainer(
        mesh=mesh,
        plan=plan,
        prompts=prompts,
        order=data.order,
        switch=WeightSwitch(
            rollout, actor_worker, prompts, mesh, check_every=config.hybrid.check_every, limit=check_limit(config)
        ),
        rollout=rollout,
        reward=reward,
        actor=actor_worker,
        critic=critic_worker(config, critic, scale_length),
        reference=reference_worker(config, mesh, spec, roles),
        advantages=AdvantagePhase(config.algorithm, controller, mesh),
        loop=data.loop(
            config,
            mesh,
            spec,
            saved_roles(actor=actor, critic=critic),
            evaluator(config, mesh, data.evaluation_sets, rollout, reward),
            controller,
        ),
        seed=config.trainer.seed,
        max_response_length=config.data.max_response_length,
    )


@dataclass(frozen=True)
class TrainingData:
    """What all kinds of training know before a model is built: the order and length of the run, what it evaluates."""

    tokenizer: Tokenizer
    order: PromptOrder
    total_steps: int
    evaluation_sets: Mapping[str, Sequence[Prompt]]

    @classmethod
    def of(
        cls, config: ExperimentConfig, tokenizer: Tokenizer, num_rows: int, *, with_prompts: bool = True
    ) -> TrainingData:
        """`with_prompts`: held-out files are prompts, which are read here; otherwise the caller reads them."""
        order = PromptOrder(num_rows, config.data.train_batch_size, config.data.seed, config.data.shuffle)
        sets = load_evaluation_sets(config, tokenizer) if with_prompts else {}
        return cls(tokenizer, order, number_of_steps(config, order), sets)

    def loop(
        self,
        config: ExperimentConfig,
        mesh: Mesh,
        spec: ModelSpec,
        roles: Mapping[str, SavedRole],
        evaluator: Evaluates | None,
        controller: KLController | None,
        exported_role: str = "actor",
    ) -> Loop:
        parts = LoopParts(
            total_steps=self.total_steps,
            spec=spec,
            tokenizer=self.tokenizer,
            roles=roles,
            order=self.order,
            controller=controller,
            evaluator=evaluator,
            exported_role=exported_role,
        )
        return Loop(config, mesh, parts)


def number_of_steps(config: ExperimentConfig, order: PromptOrder) -> int:
    """`total_steps`, or the whole steps of `total_epochs` passes."""
    if config.trainer.total_steps is not None:
        return config.trainer.total_steps
    assert config.trainer.total_epochs is not None, "checked by require_sound"
    return config.trainer.total_epochs * order.steps_per_epoch


def log_probs(config: ExperimentConfig, mesh: Mesh, spec: ModelSpec, temperature: float | None = None) -> LogProbs:
    """How actor and reference read log-probs, at the rollout's temperature unless told."""
    return LogProbs(
        mesh=mesh,
        vocab_size=spec.shape.vocab_size,
        temperature=config.rollout.temperature if temperature is None else temperature,
        chunk_tokens=config.actor.entropy_chunk_tokens,
    )


def critic_worker(config: ExperimentConfig, critic: TrainedRole, scale_length: int) -> CriticWorker:
    micro = config.critic.ppo_micro_batch_size_per_gpu or config.actor.ppo_micro_batch_size_per_gpu
    return CriticWorker(
        critic.engine,
        config.critic,
        micro_batch_size=micro,
        forward_micro_batch_size=config.critic.forward_micro_batch_size_per_gpu or micro,
        scale_length=scale_length,
    )


def reference_worker(
    config: ExperimentConfig, mesh: Mesh, spec: ModelSpec, roles: RoleBuilder
) -> ReferenceWorker | NoReference:
    if not config.needs_reference:
        return NoReference()
    size = config.ref.log_prob_micro_batch_size_per_gpu or config.actor.log_prob_micro_batch
    return ReferenceWorker(roles.reference(), log_probs(config, mesh, spec), size)


def load_evaluation_sets(config: ExperimentConfig, tokenizer: Tokenizer) -> dict[str, list[Prompt]]:
    """The held-out prompts of each file, by the file's name. ConfigError where two files have one name."""
    return held_out(config, lambda file: load_prompts(config.data, tokenizer, [file], config.data.max_val_samples))


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


def refuse_foreign_tokens(sequences: Iterable[Sequence[int]], config: ExperimentConfig, spec: ModelSpec) -> None:
    """DataError where the tokenizer gives tokens that the model lacks, which its padding would hide."""
    highest = max(max(sequence) for sequence in sequences)
    if highest >= spec.shape.vocab_size:
        raise DataError(
            f"{config.model.tokenizer_folder}: its tokenizer gives token {highest}, and the vocabulary of "
            f"{config.model.path} ends at {spec.shape.vocab_size - 1}; use the tokenizer that belongs to the model"
        )


def evaluator(
    config: ExperimentConfig,
    mesh: Mesh,
    sets: Mapping[str, Sequence[Prompt]],
    rollout: RolloutWorker,
    reward: RewardWorker,
) -> Evaluator:
    sampling = evaluation_sampling(config.trainer.evaluation, training_sampling(config))
    return Evaluator(mesh, sets, rollout, reward, config.trainer.evaluation, sampling)


def build_evaluator(config: ExperimentConfig, mesh: Mesh, spec: ModelSpec, model: nn.Module) -> Evaluator:
    """The evaluator of an experiment around a policy that is not trained."""
    if config.reward is None:
        raise ConfigError("reward: is missing, and responses can't be scored; add reward.parts")
    tokenizer = load_tokenizer(config.model.tokenizer_folder)
    rollout = rollout_worker(config, mesh, spec, tokenizer, model)
    return evaluator(config, mesh, load_evaluation_sets(config, tokenizer), rollout, RewardWorker(config.reward, mesh))


def saved_roles(**roles: TrainedRole) -> dict[str, SavedRole]:
    """What a checkpoint holds of each trained role."""
    return {name: SavedRole(role.model, role.engine.optimizer) for name, role in roles.items()}
