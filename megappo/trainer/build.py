"""The only wiring: from a configuration and a mesh to a trainer whose parts know nothing of each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from megappo.algorithms.kl import KLController
from megappo.config.checks import require_sound
from megappo.config.experiment import ExperimentConfig
from megappo.data.iterate import PromptOrder
from megappo.data.prompts import load_prompts, load_supervised
from megappo.data.sources import source_name
from megappo.data.tokenizer import Tokenizer, load_tokenizer
from megappo.engines.native_rollout import NativeRolloutEngine
from megappo.engines.rollout import SamplingParams
from megappo.errors import ConfigError, DataError
from megappo.experience.sample import Prompt
from megappo.models.build import ModelSpec
from megappo.parallel.mesh import Mesh
from megappo.planner.batch import plan_batches, plan_supervised
from megappo.trainer.advantages import AdvantagePhase
from megappo.trainer.checkpoint import SavedRole
from megappo.trainer.evaluate import Evaluator, evaluation_sampling
from megappo.trainer.loop import Loop, LoopParts
from megappo.trainer.ppo import PPOTrainer
from megappo.trainer.roles import RoleBuilder, TrainedRole
from megappo.trainer.sft import SupervisedTrainer
from megappo.workers.actor import ActorWorker
from megappo.workers.critic import CriticWorker
from megappo.workers.policy import LogProbs
from megappo.workers.reference import NoReference, ReferenceWorker
from megappo.workers.reward import RewardWorker
from megappo.workers.rollout import RolloutWorker


def build_trainer(config: ExperimentConfig, mesh: Mesh) -> PPOTrainer | SupervisedTrainer:
    """The trainer of `config.trainer.kind`, ready to `fit`. Raises UserError before a model is built where it can."""
    require_sound(config, mesh.world_size)
    return build_ppo(config, mesh) if config.trainer.kind == "ppo" else build_supervised(config, mesh)


def build_ppo(config: ExperimentConfig, mesh: Mesh) -> PPOTrainer:
    """Data and rewards first, models after: what is cheap to refuse is refused before anything is expensive."""
    assert config.reward is not None, "checked by require_sound"
    plan = plan_batches(config, mesh.dp)
    tokenizer = load_tokenizer(config.model.tokenizer_folder)
    prompts = load_prompts(config.data, tokenizer, config.data.train_files, config.data.max_samples)
    order = PromptOrder(len(prompts), config.data.train_batch_size, config.data.seed, config.data.shuffle)
    evaluation_sets = load_evaluation_sets(config, tokenizer)
    reward = RewardWorker(config.reward, mesh)
    total_steps = number_of_steps(config, order)

    roles = RoleBuilder(config, mesh)
    spec = roles.spec()
    refuse_foreign_tokens((prompt.token_ids for prompt in prompts), config, spec)
    actor = roles.actor(total_steps * plan.actor.optimizer_steps)
    critic = roles.critic(total_steps * plan.critic.optimizer_steps)
    rollout = rollout_worker(config, mesh, spec, tokenizer, actor.model)
    controller = KLController(
        **config.algorithm.kl_ctrl.model_dump(exclude={"type"}), kind=config.algorithm.kl_ctrl.type
    )
    scale_length = config.actor.loss_scale_length or config.data.max_response_length
    micro = config.critic.ppo_micro_batch_size_per_gpu or config.actor.ppo_micro_batch_size_per_gpu
    return PPOTrainer(
        mesh=mesh,
        plan=plan,
        prompts=prompts,
        order=order,
        rollout=rollout,
        reward=reward,
        actor=ActorWorker(actor.engine, config.actor, log_probs(config, mesh, spec), scale_length=scale_length),
        critic=CriticWorker(
            critic.engine,
            config.critic,
            micro_batch_size=micro,
            forward_micro_batch_size=config.critic.forward_micro_batch_size_per_gpu or micro,
            scale_length=scale_length,
        ),
        reference=reference_worker(config, mesh, spec, roles),
        advantages=AdvantagePhase(config.algorithm, controller, mesh),
        loop=Loop(
            config,
            mesh,
            LoopParts(
                total_steps=total_steps,
                spec=spec,
                tokenizer=tokenizer,
                roles=saved_roles(actor=actor, critic=critic),
                order=order,
                controller=controller,
                evaluator=evaluator(config, mesh, evaluation_sets, rollout, reward),
            ),
        ),
        seed=config.trainer.seed,
        max_response_length=config.data.max_response_length,
    )


def build_supervised(config: ExperimentConfig, mesh: Mesh) -> SupervisedTrainer:
    plan = plan_supervised(config, mesh.dp)
    tokenizer = load_tokenizer(config.model.tokenizer_folder)
    examples = load_supervised(config.data, tokenizer, config.data.train_files, config.data.max_samples)
    order = PromptOrder(len(examples), config.data.train_batch_size, config.data.seed, config.data.shuffle)
    evaluation_sets = load_evaluation_sets(config, tokenizer)
    reward = RewardWorker(config.reward, mesh) if config.reward is not None else None
    total_steps = number_of_steps(config, order)

    roles = RoleBuilder(config, mesh)
    spec = roles.spec()
    refuse_foreign_tokens((example.token_ids for example in examples), config, spec)
    actor = roles.actor(total_steps)
    rollout = rollout_worker(config, mesh, spec, tokenizer, actor.model)
    return SupervisedTrainer(
        mesh=mesh,
        plan=plan,
        examples=examples,
        order=order,
        engine=actor.engine,
        log_probs=log_probs(config, mesh, spec, temperature=1.0),
        loop=Loop(
            config,
            mesh,
            LoopParts(
                total_steps=total_steps,
                spec=spec,
                tokenizer=tokenizer,
                roles=saved_roles(actor=actor),
                order=order,
                controller=None,
                evaluator=evaluator(config, mesh, evaluation_sets, rollout, reward) if reward is not None else None,
            ),
        ),
    )


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


def rollout_worker(
    config: ExperimentConfig, mesh: Mesh, spec: ModelSpec, tokenizer: Tokenizer, model: nn.Module
) -> RolloutWorker:
    """The native engine on the actor's own shards."""
    engine = NativeRolloutEngine(
        model,
        spec.shape,
        mesh,
        decode=tokenizer.decode,
        eos_ids=tokenizer.eos_ids,
        max_num_seqs=config.rollout.max_num_seqs,
        max_num_batched_tokens=config.rollout.max_num_batched_tokens,
    )
    return RolloutWorker(engine, training_sampling(config), num_samples=config.rollout.n, seed=config.trainer.seed)


def training_sampling(config: ExperimentConfig) -> SamplingParams:
    """How training responses are sampled: from the whole distribution, whose log-probs the trainer computes."""
    return SamplingParams(
        temperature=config.rollout.temperature,
        max_tokens=config.data.max_response_length,
        stop=config.rollout.stop,
        ignore_eos=config.rollout.ignore_eos,
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
    sets: dict[str, list[Prompt]] = {}
    for file in config.data.val_files:
        name = source_name(file)
        if name in sets:
            raise ConfigError(
                f"data.val_files: {file} would be the second data set named {name!r} in the metrics eval/{name}/…; "
                "give one of the two another file name"
            )
        sets[name] = load_prompts(config.data, tokenizer, [file], config.data.max_val_samples)
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
