"""The wiring of PPO: from a configuration and a mesh to a trainer whose parts know nothing of each other.

What learns from a fixed data set is wired in `build_offline.py`; which of all is meant, in `kinds.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from megappo.algorithms.kl import EXACT, KLController
from megappo.config.experiment import ExperimentConfig
from megappo.config.passes import (
    PassSize,
    actor_forward,
    actor_update,
    critic_forward,
    critic_update,
    reference_forward,
)
from megappo.data.feed import Order, PromptFeed
from megappo.data.iterate import PromptOrder
from megappo.data.tokenizer import Tokenizer, run_tokenizer
from megappo.engines.offload import NO_MEMORY, Memory
from megappo.errors import ConfigError, DataError
from megappo.experience.sample import Prompt
from megappo.models.build import ModelSpec
from megappo.observe.memory import AbsentBytes
from megappo.parallel.collectives import sum_over
from megappo.parallel.mesh import Mesh
from megappo.planner.batch import BatchPlan, plan_batches
from megappo.trainer.advantages import AdvantagePhase
from megappo.trainer.balance import Balance, NoBalance
from megappo.trainer.build_experience import (
    greedy_baseline,
    pair_samples,
    prompt_feed,
    replay,
    reward_worker,
    weight_switch,
    with_dynamic_sampling,
)
from megappo.trainer.checkpoint import SavedFile
from megappo.trainer.collect import Collector
from megappo.trainer.evaluate import Evaluator, evaluation_sampling
from megappo.trainer.generation import rollout_worker, training_sampling
from megappo.trainer.loop import Evaluates, Loop, LoopParts
from megappo.trainer.pair_replay import PairReplay, with_log_probs
from megappo.trainer.ppo import PPOTrainer
from megappo.trainer.prompt_sets import load_evaluation_sets
from megappo.trainer.replay import NoReplay, Replay
from megappo.trainer.roles import RoleBuilder, TrainedRole
from megappo.trainer.saved_role import SavedRole
from megappo.workers.actor import ActorWorker, KLTerm, estimated_kl, exact_kl
from megappo.workers.critic import CriticWorker, NoCritic
from megappo.workers.cutting import Cutter
from megappo.workers.policy import LogProbs
from megappo.workers.reference import NoReference, ReferenceWorker
from megappo.workers.reward import RewardWorker
from megappo.workers.reward_sets import SetRewards
from megappo.workers.rollout import RolloutWorker
from megappo.workers.shaping import RewardShaping


def build_ppo(config: ExperimentConfig, mesh: Mesh) -> PPOTrainer:
    """Data and rewards first, models after: what is cheap to refuse is refused before anything is expensive."""
    assert config.reward is not None, "checked by require_sound"
    plan = plan_batches(config, mesh.dp)
    tokenizer = run_tokenizer(config.model)
    prompts, feed = prompt_feed(config, tokenizer)
    total_steps, evaluation_sets = number_of_steps(config, feed), load_evaluation_sets(config, tokenizer)
    reward = reward_worker(config, mesh)
    learned = reward.in_training()
    roles = RoleBuilder(config, mesh)
    spec = roles.spec()
    refuse_foreign_tokens((prompt.token_ids for prompt in prompts), config, spec)
    offline = pair_samples(config, tokenizer)
    refuse_foreign_tokens(((*one.prompt.token_ids, *one.response_ids) for one in offline), config, spec)

    actor = roles.actor(plan.actor.optimizer_steps_of(total_steps))
    critic = roles.critic(plan.critic.optimizer_steps_of(total_steps)) if config.needs_critic else None
    rollout = rollout_worker(
        config, mesh, spec, tokenizer, actor.engine.model, on_sample=learned.begin, memory=actor.engine.memory
    )
    reference = reference_worker(config, mesh, roles, actor)
    policy = actor_worker(config, mesh, spec, actor, reference)
    values = critic_worker(config, mesh, critic, scale_length(config))

    switch = weight_switch(config, mesh, rollout, policy, prompts)
    collector = Collector(feed, plan, mesh, switch, rollout, learned, greedy_baseline(config, rollout, learned, mesh))
    controller = kl_controller(config)
    advantages = AdvantagePhase(config.algorithm, controller, mesh, plan.prompts, plan.n)
    shaping = RewardShaping(config.reward, sum_over(mesh.dp_group, mesh.device), config.data.max_response_length)
    pairs = with_log_probs(offline, policy, mesh) if offline else []
    replayed = replay(config, mesh, pairs, learned, shaping, reference, values, advantages)
    parts = LoopParts(
        total_steps=total_steps, spec=spec, tokenizer=tokenizer, roles=saved_roles(actor=actor, critic=critic),
        order=feed, controller=controller, evaluator=evaluator(config, mesh, evaluation_sets, rollout, reward),
        memory=roles.memory, absent=rollout.absent, files=saved_files(shaping, replayed),
    )  # fmt: skip
    return PPOTrainer(
        mesh=mesh, plan=plan, collector=with_dynamic_sampling(config, collector), shaping=shaping,
        balance=balance(config, mesh, plan, spec), actor=policy, critic=values, reference=reference,
        advantages=advantages, replay=replayed, loop=Loop(config, mesh, parts), seed=config.trainer.seed,
        max_response_length=config.data.max_response_length,
    )  # fmt: skip


def actor_worker(
    config: ExperimentConfig,
    mesh: Mesh,
    spec: ModelSpec,
    actor: TrainedRole,
    reference: ReferenceWorker | NoReference,
) -> ActorWorker:
    """The worker of the built actor."""
    return ActorWorker(
        actor.engine, config.actor, log_probs(config, mesh, spec), scale_length=scale_length(config),
        update_cut=cutter(config, mesh, actor_update(config)), forward_cut=cutter(config, mesh, actor_forward(config)),
        kl_term=kl_term(config, reference), bypass=config.algorithm.rollout_correction.bypass_mode,
        has_reference=config.needs_reference, router_replay=config.actor.router_replay,
    )  # fmt: skip


def scale_length(config: ExperimentConfig) -> int:
    """Tokens that a sequence's loss is divided by where `loss_agg_mode` has a constant."""
    return config.actor.loss_scale_length or config.data.max_response_length


def kl_controller(config: ExperimentConfig) -> KLController:
    """What keeps the coefficient of the KL in the reward."""
    settings = config.algorithm.kl_ctrl
    return KLController(**settings.model_dump(exclude={"type"}), kind=settings.type)


def saved_files(shaping: RewardShaping, replayed: Replay | PairReplay | NoReplay) -> dict[str, SavedFile]:
    """Parts with files of their own in a checkpoint."""
    files: dict[str, SavedFile] = {"shaping.json": shaping}
    return files | ({"replay.sqlite": replayed} if isinstance(replayed, Replay) else {})


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
        memory: Memory = NO_MEMORY,
    ) -> Loop:
        """The loop over this data, with its checkpoints, evaluations and reports."""
        parts = LoopParts(
            total_steps=self.total_steps,
            spec=spec,
            tokenizer=self.tokenizer,
            roles=roles,
            order=self.order,
            controller=controller,
            evaluator=evaluator,
            exported_role=exported_role,
            memory=memory,
            absent=evaluator.rollout.absent if isinstance(evaluator, Evaluator) else AbsentBytes(),
        )
        return Loop(config, mesh, parts)


def number_of_steps(config: ExperimentConfig, order: Order | PromptFeed) -> int:
    """`total_steps`, or the whole steps of `total_epochs` passes."""
    if config.trainer.total_steps is not None:
        return config.trainer.total_steps
    assert config.trainer.total_epochs is not None, "checked by require_sound"
    return config.trainer.total_epochs * order.steps_per_epoch


def log_probs(config: ExperimentConfig, mesh: Mesh, spec: ModelSpec, temperature: float | None = None) -> LogProbs:
    """How the model of `spec`, actor or reference, reads log-probs, at the rollout's temperature unless told."""
    return LogProbs(
        mesh=mesh,
        vocab_size=spec.shape.vocab_size,
        temperature=config.rollout.temperature if temperature is None else temperature,
        chunk_tokens=config.actor.entropy_chunk_tokens,
    )


def balance(config: ExperimentConfig, mesh: Mesh, plan: BatchPlan, spec: ModelSpec) -> Balance | NoBalance:
    if not config.trainer.balance_batch or mesh.dp == 1:
        return NoBalance()
    return Balance(mesh, plan, spec.shape.hidden_size)


def cutter(config: ExperimentConfig, mesh: Mesh, size: PassSize) -> Cutter:
    """What makes the micro-batches of one kind of pass."""
    return Cutter(mesh, size.sequences, config.model.use_remove_padding, size.tokens)


def critic_worker(
    config: ExperimentConfig, mesh: Mesh, critic: TrainedRole | None, scale_length: int
) -> CriticWorker | NoCritic:
    """The worker of a built critic; without one (`critic` None) what stands in its place."""
    if critic is None:
        return NoCritic()
    return CriticWorker(
        critic.engine,
        config.critic,
        update_cut=cutter(config, mesh, critic_update(config)),
        forward_cut=cutter(config, mesh, critic_forward(config)),
        scale_length=scale_length,
    )


def reference_worker(
    config: ExperimentConfig, mesh: Mesh, roles: RoleBuilder, actor: TrainedRole
) -> ReferenceWorker | NoReference:
    """The worker of the reference; where no KL needs one, its stand-in, which fills nothing."""
    if not config.needs_reference:
        return NoReference()
    fills_kl = config.algorithm.use_kl_in_reward and config.algorithm.kl_penalty == EXACT
    policy = actor.engine if fills_kl else None
    cut = cutter(config, mesh, reference_forward(config))
    return ReferenceWorker(roles.reference(actor), log_probs(config, mesh, roles.reference_spec()), cut, policy)


def kl_term(config: ExperimentConfig, reference: ReferenceWorker | NoReference) -> KLTerm | None:
    """The KL of the actor's loss: from the log-probs in the batch, or from the reference's logits."""
    if not config.actor.use_kl_loss:
        return None
    if config.actor.kl_loss_type != EXACT:
        return estimated_kl(config.actor.kl_loss_type)
    assert isinstance(reference, ReferenceWorker), "a KL in the loss needs a reference"
    return exact_kl(reference)


def refuse_foreign_tokens(sequences: Iterable[Sequence[int]], config: ExperimentConfig, spec: ModelSpec) -> None:
    """DataError where the tokenizer gives tokens that the model lacks, which its padding would hide."""
    highest = max((max(sequence) for sequence in sequences), default=0)
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
    reward: RewardWorker | SetRewards,
) -> Evaluator:
    """Evaluates the policy on the held-out prompts of `sets`."""
    sampling = evaluation_sampling(config.trainer.evaluation, training_sampling(config))
    return Evaluator(mesh, sets, rollout, reward, config.trainer.evaluation, sampling)


def build_evaluator(config: ExperimentConfig, mesh: Mesh, spec: ModelSpec, model: nn.Module) -> Evaluator:
    """The evaluator of an experiment around a policy that is not trained."""
    if config.reward is None:
        raise ConfigError("reward: is missing, and responses can't be scored; add reward.parts")
    tokenizer = run_tokenizer(config.model)
    rollout = rollout_worker(config, mesh, spec, tokenizer, model)
    return evaluator(config, mesh, load_evaluation_sets(config, tokenizer), rollout, reward_worker(config, mesh))


def saved_roles(**roles: TrainedRole | None) -> dict[str, SavedRole]:
    """What a checkpoint holds of each trained role; None is one that the run has not got."""
    return {
        name: SavedRole(role.model, role.engine.optimizer, role.frozen)
        for name, role in roles.items()
        if role is not None
    }
