"""The wiring of what learns from a fixed data set: supervised fine-tuning, reward models, DPO.

Data first, models after: what is cheap to refuse is refused before anything is expensive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from megappo.config.experiment import ExperimentConfig
from megappo.config.passes import reference_forward
from megappo.data.conversation import ConversationEncoder
from megappo.data.preferences import PreferencePair, load_preferences
from megappo.data.prompts import load_supervised
from megappo.data.tokenizer import Tokenizer, run_tokenizer
from megappo.experience.micro import MicroBatch, micro_batches
from megappo.experience.packed import packed_micro_batches
from megappo.models.build import ModelSpec
from megappo.parallel.mesh import Mesh
from megappo.planner.batch import plan_supervised
from megappo.trainer.build import (
    TrainingData,
    cutter,
    evaluator,
    log_probs,
    refuse_foreign_tokens,
    saved_roles,
)
from megappo.trainer.dpo import DPOMeasure, DPOTask
from megappo.trainer.evaluate import Evaluator
from megappo.trainer.generation import rollout_worker
from megappo.trainer.offline import OfflineTrainer
from megappo.trainer.pair_evaluation import PairEvaluator
from megappo.trainer.prompt_sets import held_out
from megappo.trainer.reward_model import EncodedPair, RewardModelMeasure, RewardModelTask, encode_pairs
from megappo.trainer.reward_models import build_reward_worker
from megappo.trainer.roles import RoleBuilder, TrainedRole
from megappo.trainer.sft import SupervisedTask
from megappo.workers.reference import ReferenceWorker
from megappo.workers.reward import RewardWorker

T = TypeVar("T")


def build_supervised(config: ExperimentConfig, mesh: Mesh) -> OfflineTrainer:
    """There is a generation engine only where held-out prompts are answered and scored."""
    plan = plan_supervised(config, mesh.dp)
    tokenizer = run_tokenizer(config.model)
    examples = load_supervised(config.data, tokenizer, config.data.train_files, config.data.max_samples)
    data = TrainingData.of(config, tokenizer, len(examples))
    reward = _evaluation_reward(config, mesh)

    roles = RoleBuilder(config, mesh)
    spec = roles.spec()
    refuse_foreign_tokens((example.token_ids for example in examples), config, spec)
    actor = roles.actor(data.total_steps)
    task = SupervisedTask(mesh, examples, log_probs(config, mesh, spec, temperature=1.0))
    evaluates = _answers(config, mesh, data, spec, actor, reward) if reward is not None else None
    loop = data.loop(config, mesh, spec, saved_roles(actor=actor), evaluates, controller=None, memory=roles.memory)
    return OfflineTrainer(mesh, plan, data.order, actor.engine, task, loop, cut(config))


def build_dpo(config: ExperimentConfig, mesh: Mesh) -> OfflineTrainer:
    """Held-out files are prompts to answer where there is a reward, and pairs otherwise."""
    plan = plan_supervised(config, mesh.dp)
    tokenizer = run_tokenizer(config.model)
    pairs = load_preferences(config.data, tokenizer, config.data.train_files, config.data.max_samples)
    reward = _evaluation_reward(config, mesh)
    measured = {} if reward is not None else held_out_pairs(config, tokenizer)
    data = TrainingData.of(config, tokenizer, len(pairs), with_prompts=reward is not None)

    roles = RoleBuilder(config, mesh)
    spec = roles.spec()
    refuse_foreign_tokens(tokens_of(pairs), config, spec)
    actor = roles.actor(data.total_steps)
    read = log_probs(config, mesh, spec, temperature=1.0)
    read_reference = log_probs(config, mesh, roles.reference_spec(), temperature=1.0)
    reference_cut = cutter(config, mesh, reference_forward(config))
    reference = ReferenceWorker(roles.reference(actor), read_reference, reference_cut)
    task = DPOTask(config.dpo, pairs, read, reference, plan.sequences)
    evaluates: Evaluator | PairEvaluator[PreferencePair]
    if reward is not None:
        evaluates = _answers(config, mesh, data, spec, actor, reward)
    else:
        evaluates = PairEvaluator(mesh, measured, DPOMeasure(task, actor.engine, 2 * plan.micro_batch))
    loop = data.loop(config, mesh, spec, saved_roles(actor=actor), evaluates, controller=None, memory=roles.memory)
    return OfflineTrainer(mesh, plan, data.order, actor.engine, task, loop, cut(config))


def build_reward_model(config: ExperimentConfig, mesh: Mesh) -> OfflineTrainer:
    """Held-out files are pairs."""
    plan = plan_supervised(config, mesh.dp)
    tokenizer = run_tokenizer(config.model)
    roles = RoleBuilder(config, mesh)
    spec = roles.spec()
    pairs, sets = pairs_to_score(config, tokenizer, spec)
    data = TrainingData.of(config, tokenizer, len(pairs), with_prompts=False)
    refuse_foreign_tokens((ids for pair in pairs for ids in (pair.chosen, pair.rejected)), config, spec)
    model = roles.reward_model(data.total_steps)
    pad_id = spec.hf_config.get("pad_token_id")
    task = RewardModelTask(pairs, pad_id, plan.sequences)
    evaluates = PairEvaluator(mesh, sets, RewardModelMeasure(model.engine, pad_id, 2 * plan.micro_batch))
    loop = data.loop(
        config,
        mesh,
        spec,
        saved_roles(reward_model=model),
        evaluates,
        controller=None,
        exported_role="reward_model",
        memory=roles.memory,
    )
    return OfflineTrainer(mesh, plan, data.order, model.engine, task, loop, cut(config))


def cut(config: ExperimentConfig) -> Callable[..., list[MicroBatch]]:
    """What makes the micro-batches of updates."""
    return packed_micro_batches if config.model.use_remove_padding else micro_batches


def _evaluation_reward(config: ExperimentConfig, mesh: Mesh) -> RewardWorker | None:
    """What scores the answers to held-out prompts, where there are both."""
    if config.reward is None or not config.data.val_files:
        return None
    return build_reward_worker(config, config.reward, mesh)


def _answers(
    config: ExperimentConfig, mesh: Mesh, data: TrainingData, spec: ModelSpec, actor: TrainedRole, reward: RewardWorker
) -> Evaluator:
    """The evaluation that has the policy answer held-out prompts."""
    rollout = rollout_worker(config, mesh, spec, data.tokenizer, actor.engine.model, memory=actor.engine.memory)
    return evaluator(config, mesh, data.evaluation_sets, rollout, reward)


def held_out_pairs(config: ExperimentConfig, tokenizer: Tokenizer) -> dict[str, list[PreferencePair]]:
    """The pairs of each held-out file, by the file's name."""
    return held_out(config, lambda file: load_preferences(config.data, tokenizer, [file], config.data.max_val_samples))


def tokens_of(pairs: Sequence[PreferencePair]) -> Iterator[tuple[int, ...]]:
    """Both sequences of each pair."""
    return ((*pair.prompt.token_ids, *ids) for pair in pairs for ids in (pair.chosen_ids, pair.rejected_ids))


def pairs_to_score(
    config: ExperimentConfig, tokenizer: Tokenizer, spec: ModelSpec
) -> tuple[list[EncodedPair], dict[str, list[EncodedPair]]]:
    """Training pairs and those of each held-out file, as a reward model reads them."""
    encoder = ConversationEncoder(tokenizer, config.data.apply_chat_template, "data.apply_chat_template")

    def encoded(pairs: Sequence[PreferencePair]) -> list[EncodedPair]:
        return encode_pairs(pairs, encoder, spec.shape.max_positions)

    pairs = load_preferences(config.data, tokenizer, config.data.train_files, config.data.max_samples)
    return encoded(pairs), {name: encoded(found) for name, found in held_out_pairs(config, tokenizer).items()}
